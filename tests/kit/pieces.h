// A case of the table cut into pieces by rows and by keys: each piece is a call of its own, over copies of its part.
#pragma once

#include <cstdint>
#include <vector>

#include "heddle/partial.h"
#include "kit/case_data.h"
#include "kit/device_mirror.h"

namespace heddle::kit {

// Rows [row_begin, row_end) of every sequence and keys [key_begin, key_end), as far as it has them.
struct Cut {
  std::int64_t row_begin, row_end, key_begin, key_end;
};

// Whether pieces can say what the whole does: its rows and keys are aligned by lengths, and positions of their own must
// leave the columns of its bias and mask, and the counters of its dropout, where they are.
bool can_be_cut(const CaseData& whole);

struct Piece {
  Piece(const CaseData& whole, const Cut& cut);

  AttentionOptions options;  // without a sink
  HostTensor q, k, v, d_o, d_lse;
  // Of each of its rows, and of its keys, in natural order: that of the whole.
  std::vector<std::int64_t> row_of, key_of;

  // The options of the call on a GPU, whose memory `there` holds; `sink`: the whole's.
  AttentionOptions on_gpu(bool sink, std::vector<DeviceTensor>& there) const;

  HostTensor new_o() const;
  HostTensor new_lse() const;
  // The index in a tensor of the whole with `width` numbers a row (lse: one for each head) of entry n of the piece's.
  std::int64_t whole_o(std::int64_t n) const;
  std::int64_t whole_lse(std::int64_t n) const;
  // Adds x, of row_of.size() (key_of.size()) rows, to the whole's numbers.
  static void add(const HostTensor& x, const std::vector<std::int64_t>& of, std::vector<double>& to);
  // Adds dbias, whose rows are the piece's, to the whole's numbers.
  void add_bias(const HostTensor& dbias, std::vector<double>& to) const;

  void forward(const std::string& candidate, const HostTensor& o, const HostTensor& lse) const;
  void backward(const std::string& candidate, const HostTensor& o, const HostTensor& lse, const TensorView& o_gradient,
                const TensorView& lse_gradient, const AttentionGradients& gradients) const;

 private:
  const CaseData& whole_;
  const Cut cut_;
  std::int64_t rows_;  // in a sequence, or in all if they are packed
  HostTensor bias_, mask_, cu_q_, cu_k_, used_q_, used_k_, q_offset_, key_offset_;
};

}  // namespace heddle::kit

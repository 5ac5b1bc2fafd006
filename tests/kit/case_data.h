// The tensors of one case: seeded values where a value is meant to be read, NaN everywhere else (padding, gaps, rows
// and keys beyond the used lengths, unused pages, bias entries of removed pairs).
#pragma once

#include <cstdint>

#include "kit/cases.h"
#include "kit/host_tensor.h"
#include "problem/attention.h"

namespace heddle::kit {

struct Gradients {
  HostTensor dq, dk, dv, dbias, dsink;  // dbias and dsink: only if the case has bias, sink

  AttentionGradients views() const { return {dq.view(), dk.view(), dv.view(), dbias.view(), dsink.view()}; }
};

class CaseData {
 public:
  explicit CaseData(const AttentionCase& spec, std::uint64_t seed = 1);

  const AttentionCase spec;
  HostTensor q, k, v;
  HostTensor d_o, d_lse;  // made for every case with a backward; d_lse only if the case asks for it
  HostTensor bias, mask, alibi, sink;
  HostTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx, leftpad;
  HostTensor q_offset, key_offset, draft_mask, q_scale, k_scale, v_scale;

  AttentionOptions options() const;
  // Outputs, poisoned and guarded, in the case's output layout.
  HostTensor new_o() const;
  HostTensor new_lse() const;
  Gradients new_gradients() const;

  // The checked problem, as kernels get it. `gradients` are the tensors to differentiate for.
  AttentionProblem problem() const;
  AttentionBackwardProblem backward_problem(const Gradients& gradients) const;

  // One line: sizes, dtype and options.
  std::string describe() const;

 private:
  class Maker;
};

}  // namespace heddle::kit

#include "kit/pieces.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kit/indices.h"

namespace heddle::kit {
namespace {

using std::int64_t;

// Numbers that each row of x has.
int64_t width_of(const HostTensor& x, int rows_rank) {
  const TensorView& view = x.view();
  return std::accumulate(view.shape.begin() + rows_rank, view.shape.begin() + view.rank, int64_t{1},
                         std::multiplies<>());
}

// The rows `of` of x, which is [B, rows, ...] or packed [rows, ...]; rows: of a sequence of the result.
HostTensor gathered(const HostTensor& x, const std::vector<int64_t>& of, bool packed, int64_t B, int64_t rows) {
  const TensorView& view = x.view();
  std::vector<int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  shape[packed ? 0 : 1] = packed ? std::ssize(of) : rows;
  if (!packed) shape[0] = B;
  HostTensor out = HostTensor::input(view.dtype, shape);
  const int64_t width = width_of(x, packed ? 1 : 2);
  for (int64_t n = 0; n < std::ssize(of) * width; ++n) out.set(n, x.get(of[n / width] * width + n % width));
  return out;
}

// What lets the whole's row 0 stand where its key 0 does, or the reverse, with its diagonal through them.
int64_t shift(const AttentionProblem& p, const Sequence& s) {
  const bool by_position =
      p.causal != Causal::none || p.window_left >= 0 || p.window_right >= 0 || static_cast<bool>(p.alibi);
  return by_position ? s.off : 0;
}

int64_t part(int64_t length, int64_t begin, int64_t end) { return std::clamp(length, begin, end) - begin; }

}  // namespace

bool can_be_cut(const CaseData& whole) {
  const AttentionProblem p = whole.problem();
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t by = shift(p, p.sequence(b));
    if (by != 0 && p.dropout.p > 0) return false;
    if (by < 0 && (p.bias || p.mask)) return false;
  }
  return !p.page_table && !p.cache_batch_idx && !p.cache_leftpad && !p.draft_mask && p.q_offset.data == nullptr &&
         p.key_offset.data == nullptr;
}

Piece::Piece(const CaseData& whole, const Cut& cut) : options(whole.options()), whole_(whole), cut_(cut) {
  const AttentionCase& c = whole.spec;
  const AttentionProblem p = whole.problem();
  std::vector<int64_t> q_starts = {0}, k_starts = {0}, q_used, k_used, q_offsets, key_offsets;
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    const int64_t rows = part(s.q_rows, cut.row_begin, cut.row_end), keys = part(s.k_rows, cut.key_begin, cut.key_end);
    const int64_t first_row = c.packed_q ? s.q_begin : b * p.Sq, first_key = c.packed_k ? s.k_begin : b * p.Sk;
    for (int64_t i = 0; i < rows; ++i) row_of.push_back(first_row + cut.row_begin + i);
    for (int64_t j = 0; j < keys; ++j) key_of.push_back(first_key + cut.key_begin + j);
    q_starts.push_back(q_starts.back() + rows);
    k_starts.push_back(k_starts.back() + keys);
    q_used.push_back(part(s.sq, cut.row_begin, cut.row_end));
    k_used.push_back(part(s.sk, cut.key_begin, cut.key_end));
    q_offsets.push_back(c.q_step * cut.row_begin + std::max<int64_t>(shift(p, s), 0));
    key_offsets.push_back(c.key_step * cut.key_begin - std::min<int64_t>(shift(p, s), 0));
  }
  const int64_t longest = cut.row_end - cut.row_begin, most_keys = cut.key_end - cut.key_begin;
  rows_ = c.packed_q ? std::ssize(row_of) : longest;
  q = gathered(whole.q, row_of, c.packed_q, p.B, longest);
  d_o = gathered(whole.d_o, row_of, c.packed_q, p.B, longest);
  k = gathered(whole.k, key_of, c.packed_k, p.B, most_keys);
  v = gathered(whole.v, key_of, c.packed_k, p.B, most_keys);
  if (whole.d_lse.given()) {
    d_lse = new_lse();
    // Rows that are not used have none, which a merge cannot tell from rows without keys: theirs must be 0.
    for (int64_t n = 0; n < d_lse.elements(); ++n) {
      const double value = whole.d_lse.get(whole_lse(n));
      d_lse.set(n, std::isnan(value) ? 0 : value);
    }
  }

  const auto rows_of_plane = [&](const HostTensor& x) {
    if (!x.given() || x.view().shape[2] == 1) return x;
    const auto& shape = x.view().shape;
    HostTensor out = HostTensor::input(x.view().dtype, {shape[0], shape[1], longest, shape[3]});
    for (int64_t n = 0; n < out.elements(); ++n) {
      const int64_t plane = n / (longest * shape[3]), row = n / shape[3] % longest;
      out.set(n, x.get((plane * shape[2] + cut.row_begin + row) * shape[3] + n % shape[3]));
    }
    return out;
  };
  bias_ = rows_of_plane(whole.bias);
  mask_ = rows_of_plane(whole.mask);
  q_offset_ = indices(q_offsets);
  key_offset_ = indices(key_offsets);
  options.bias = bias_.view();
  options.mask = mask_.view();
  options.q_offset = q_offset_.view();
  options.key_offset = key_offset_.view();
  if (options.causal == Causal::bottom_right) options.causal = Causal::top_left;
  options.sink = {};
  if (c.packed_q) {
    cu_q_ = indices(q_starts);
    options.cu_seqlens_q = cu_q_.view();
    options.max_seqlen_q = longest;
  }
  if (c.packed_k) {
    cu_k_ = indices(k_starts);
    options.cu_seqlens_k = cu_k_.view();
    options.max_seqlen_k = most_keys;
  }
  if (c.seqused_q) {
    used_q_ = indices(q_used);
    options.seqused_q = used_q_.view();
  }
  if (c.seqused_k) {
    used_k_ = indices(k_used);
    options.seqused_k = used_k_.view();
  }
}

AttentionOptions Piece::on_gpu(bool sink, std::vector<DeviceTensor>& there) const {
  AttentionOptions out = options;
  const auto move = [&](TensorView& view, const HostTensor& host) {
    there.emplace_back(host);
    view = there.back().view();
  };
  move(out.alibi_slopes, whole_.alibi);
  move(out.bias, bias_);
  move(out.mask, mask_);
  if (sink) move(out.sink, whole_.sink);
  move(out.cu_seqlens_q, cu_q_);
  move(out.cu_seqlens_k, cu_k_);
  move(out.seqused_q, used_q_);
  move(out.seqused_k, used_k_);
  move(out.q_offset, q_offset_);
  move(out.key_offset, key_offset_);
  return out;
}

HostTensor Piece::new_o() const {
  const AttentionCase& c = whole_.spec;
  if (c.packed_q) return HostTensor::output(c.o_dtype(), {rows_, c.H, c.Dv});
  return HostTensor::output(c.o_dtype(), {c.B, rows_, c.H, c.Dv});
}

HostTensor Piece::new_lse() const {
  const AttentionCase& c = whole_.spec;
  if (c.packed_q) return HostTensor::output(DType::f32, {c.H, rows_});
  return HostTensor::output(DType::f32, {c.B, c.H, rows_});
}

int64_t Piece::whole_o(int64_t n) const {
  const int64_t width = whole_.spec.H * whole_.spec.Dv;
  return row_of[n / width] * width + n % width;
}

int64_t Piece::whole_lse(int64_t n) const {
  const AttentionCase& c = whole_.spec;
  if (c.packed_q) return n / rows_ * whole_.q.view().shape[0] + row_of[n % rows_];
  const int64_t head = n / rows_;  // b * H + h
  return head * c.Sq + row_of[head / c.H * rows_ + n % rows_] % c.Sq;
}

void Piece::add(const HostTensor& x, const std::vector<int64_t>& of, std::vector<double>& to) {
  const int64_t width = of.empty() ? 1 : x.elements() / std::ssize(of);
  for (int64_t n = 0; n < x.elements(); ++n) to[of[n / width] * width + n % width] += x.get(n);
}

void Piece::add_bias(const HostTensor& dbias, std::vector<double>& to) const {
  const auto& shape = dbias.view().shape;
  const int64_t whole_rows = whole_.bias.view().shape[2], first = whole_rows == 1 ? 0 : cut_.row_begin;
  for (int64_t n = 0; n < dbias.elements(); ++n) {
    const int64_t plane = n / (shape[2] * shape[3]), row = n / shape[3] % shape[2];
    to[(plane * whole_rows + first + row) * shape[3] + n % shape[3]] += dbias.get(n);
  }
}

void Piece::forward(const std::string& candidate, const HostTensor& o, const HostTensor& lse) const {
  AttentionOptions forced = options;
  forced.force = candidate;
  WorkspaceBuffer memory;
  Runtime runtime;
  if (const std::size_t bytes = attention_forward_workspace(q.view(), k.view(), v.view(), forced)) {
    runtime.workspace = {memory.get(bytes).data, bytes};
  }
  attention_forward(q.view(), k.view(), v.view(), o.view(), lse.view(), forced, runtime);
}

void Piece::backward(const std::string& candidate, const HostTensor& o, const HostTensor& lse,
                     const TensorView& o_gradient, const TensorView& lse_gradient,
                     const AttentionGradients& gradients) const {
  AttentionOptions forced = options;
  forced.force = candidate;
  if (gradients.merged) forced.sink = whole_.sink.view();
  WorkspaceBuffer memory;
  Runtime runtime;
  if (const std::size_t bytes = attention_backward_workspace(q.view(), k.view(), v.view(), gradients, forced)) {
    runtime.workspace = {memory.get(bytes).data, bytes};
  }
  attention_backward(q.view(), k.view(), v.view(), o.view(), lse.view(), o_gradient, lse_gradient, gradients, forced,
                     runtime);
}

}  // namespace heddle::kit

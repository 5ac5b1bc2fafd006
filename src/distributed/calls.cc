#include "distributed/calls.h"

#include "distributed/views.h"

namespace heddle::distributed {
namespace {

// The piece's part of a tensor whose rows are extent `n`; of sequence b alone unless that is -1. Not given: not given.
TensorView piece_of(const TensorView& x, int n, std::int64_t begin, std::int64_t end, std::int64_t b) {
  if (!x.given()) return x;
  const TensorView rows = part(x, n, begin, end);
  return b < 0 ? rows : entry(rows, b);
}

}  // namespace

TensorView CallMemory::written(const std::vector<std::int32_t>& x) {
  const TensorView view = index_memory_.emplace_back(memory_).get(DType::i32, {static_cast<std::int64_t>(x.size())});
  memory_.write(view.data, x.data(), x.size() * sizeof(std::int32_t));
  return view;
}

const CallMemory::Indices& CallMemory::indices_of(const Piece& piece, std::int64_t batch) {
  const bool one = piece.q_offset.size() == 1;
  const auto [at, is_new] = indices_.try_emplace({&piece, one ? batch : 0});
  if (!is_new) return at->second;
  try {
    if (one) {
      const auto count = static_cast<std::size_t>(batch);
      at->second.q_offset = written(std::vector<std::int32_t>(count, piece.q_offset[0]));
      at->second.key_offset = written(std::vector<std::int32_t>(count, piece.key_offset[0]));
    } else {
      at->second = {written(piece.cu_seqlens_q), written(piece.cu_seqlens_k), written(piece.q_offset),
                    written(piece.key_offset)};
    }
  } catch (...) {
    indices_.erase(at);
    throw;
  }
  return at->second;
}

AttentionOptions Calls::base(const Rows& rows, bool sink) const {
  AttentionOptions options;
  options.scale = options_.scale;
  options.softcap = options_.softcap;
  options.alibi_slopes = options_.alibi_slopes;
  options.force = options_.force;
  options.float32_out = rows.o.dtype == DType::f32;
  options.deterministic = rows.q.device == Device::cuda;  // the CPU is so always
  if (sink) options.sink = options_.sink;
  return options;
}

template <class Use>
void Calls::for_each_call(const Piece& piece, AttentionOptions options, std::int64_t batch, const Use& use) {
  options.causal = piece.causal;
  options.window_left = piece.window_left;
  options.window_right = piece.window_right;
  options.q_step = piece.q_step;
  options.key_step = piece.key_step;
  if (options_.bias.given()) options.bias = part(options_.bias, 2, piece.q_begin, piece.q_end);
  const CallMemory::Indices& indices = memory_.indices_of(piece, batch);
  options.q_offset = indices.q_offset;
  options.key_offset = indices.key_offset;
  if (!indices.cu_seqlens_q.given()) {  // one sequence: all of the batch at once
    use(options, std::int64_t{-1});
    return;
  }
  options.cu_seqlens_q = indices.cu_seqlens_q;
  options.cu_seqlens_k = indices.cu_seqlens_k;
  options.max_seqlen_q = piece.max_seqlen_q;
  options.max_seqlen_k = piece.max_seqlen_k;
  for (std::int64_t b = 0; b < batch; ++b) use(options, b);
}

void Calls::forward(const Piece& piece, const Rows& rows, const TensorView& k, const TensorView& v, bool sink) {
  for_each_call(piece, base(rows, sink), rows.q.shape[0], [&](const AttentionOptions& options, std::int64_t b) {
    const auto of_rows = [&](const TensorView& x, int n) { return piece_of(x, n, piece.q_begin, piece.q_end, b); };
    const auto of_keys = [&](const TensorView& x) { return piece_of(x, 1, piece.key_begin, piece.key_end, b); };
    const TensorView q = of_rows(rows.q, 1), key = of_keys(k), value = of_keys(v);
    attention_forward(q, key, value, of_rows(rows.o, 1), of_rows(rows.lse, 2), options,
                      runtime(attention_forward_workspace(q, key, value, options, runtime_)));
  });
}

void Calls::backward(const Piece& piece, const Rows& rows, const RowGradients& gradients, const TensorView& k,
                     const TensorView& v, const TensorView& dk, const TensorView& dv, bool merged) {
  for_each_call(piece, base(rows, !merged), rows.q.shape[0], [&](const AttentionOptions& options, std::int64_t b) {
    const auto of_rows = [&](const TensorView& x, int n) { return piece_of(x, n, piece.q_begin, piece.q_end, b); };
    const auto of_keys = [&](const TensorView& x) { return piece_of(x, 1, piece.key_begin, piece.key_end, b); };
    const TensorView q = of_rows(rows.q, 1), key = of_keys(k), value = of_keys(v);
    TensorView dbias;
    if (gradients.dbias.given()) {
      const auto& shape = gradients.dbias.shape;
      dbias = memory_.bias_gradient().get(DType::f32, {shape[0], shape[1], piece.q_end - piece.q_begin, shape[3]});
    }
    const AttentionGradients out{.dq = of_rows(gradients.dq, 1),
                                 .dk = of_keys(dk),
                                 .dv = of_keys(dv),
                                 .dbias = dbias,
                                 .dsink = {},
                                 .accumulate = true,
                                 .merged = merged};
    attention_backward(q, key, value, of_rows(rows.o, 1), of_rows(rows.lse, 2), of_rows(gradients.d_o, 1),
                       of_rows(gradients.d_lse, 2), out, options,
                       runtime(attention_backward_workspace(q, key, value, out, options, runtime_)));
    if (dbias.given()) add_bias_gradient(piece, dbias, gradients.dbias);
  });
}

void Calls::add_bias_gradient(const Piece& piece, const TensorView& found, const TensorView& dbias) const {
  const TensorView to = part(dbias, 2, piece.q_begin, piece.q_end);
  const auto count = static_cast<std::size_t>(to.shape[2] * to.shape[3]);
  for (std::int64_t b = 0; b < to.shape[0]; ++b) {
    for (std::int64_t h = 0; h < to.shape[1]; ++h) {
      const auto at = [&](const TensorView& x) {
        return static_cast<float*>(x.data) + b * x.stride[0] + h * x.stride[1];
      };
      memory_.memory().add({at(to), count}, {at(found), count});
    }
  }
}

void Calls::sink_gradient(const Rows& rows, const RowGradients& gradients, const TensorView& k, const TensorView& v,
                          const TensorView& dsink) {
  const TensorView key = part(k, 1, 0, 0), value = part(v, 1, 0, 0);
  const AttentionOptions options = base(rows, true);
  const AttentionGradients out{.dq = {}, .dk = {}, .dv = {}, .dbias = {}, .dsink = dsink, .merged = true};
  attention_backward(rows.q, key, value, rows.o, rows.lse, gradients.d_o, gradients.d_lse, out, options,
                     runtime(attention_backward_workspace(rows.q, key, value, out, options, runtime_)));
}

}  // namespace heddle::distributed

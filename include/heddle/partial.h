// Partial results of attention joined: calls over parts of a row's keys give the call over all of them
// (docs/partial.md).
//
// Words: partials are n >= 1 results of the same rows, each over keys of its own, as attention_forward writes them:
//   batched   o [B, Sq, H, Dv]      lse [B, H, Sq]
//   packed    o [total_q, H, Dv]    lse [H, total_q]
// o is f32, f16 or bf16, the same for all; lse is f32. Strides are free.
//
// Meaning, for each row of each head:
//   lse = ln(sum_p exp(lse_p) + exp(sink))      o = sum_p exp(lse_p - lse) o_p
// A part without any key, lse_p = -inf, counts nothing, and its o is not read. Where all are so, o = 0 and lse = -inf
// (with a sink, lse = sink). A NaN or +inf in one lse_p makes the row's o and lse NaN, a NaN in o_p its element of o.
// Milakov and Gimelshein, arXiv 1805.02867; Liu, Zaharia and Abbeel (ring attention), arXiv 2310.01889.
#pragma once

#include <span>

#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct Partial {
  TensorView o, lse;
};

// Writes o, f32 or of the partials' dtype, and, if given, lse. sink: f32 [H] or not given, a logit in the denominator
// of each row; it enters here, once, and the partials are made without it. o (lse) may be the o (lse) of one of the
// partials itself; else outputs share no memory with what is read. Needs no workspace. CPU only: tensors on a GPU are
// refused. Throws Error on a bad argument before anything is written.
//
// Sums are taken in the order of the partials, and the sink comes last: what is added are e_p = exp(lse_p - m), m the
// largest of lse_p and sink, the denominator in f64, o in f32, which is divided by the denominator at the end. So one
// partial without a sink, or beside others without keys, comes back to the bit.
void merge_attention(std::span<const Partial> partials, const TensorView& sink, const TensorView& o,
                     const TensorView& lse, const Runtime& runtime = {});

// Gradients of a loss whose derivative is d_o with respect to o (o's shape, f32 or the partials' dtype) and, if it is
// given, d_lse with respect to lse. gradients: for each partial the derivatives with respect to its o (its dtype) and
// its lse; dsink: f32 [H]. A view that is not given is not computed. With w_p = exp(lse_p - lse):
//   d_o_p = w_p d_o      d_lse_p = w_p (d_o . (o_p - o) + d_lse)      dsink = sum over rows of w_sink (d_lse - d_o . o)
// Partials without keys get zeros, whatever d_o holds.
void merge_attention_backward(std::span<const Partial> partials, const TensorView& sink, const TensorView& d_o,
                              const TensorView& d_lse, std::span<const Partial> gradients, const TensorView& dsink,
                              const Runtime& runtime = {});

}  // namespace heddle

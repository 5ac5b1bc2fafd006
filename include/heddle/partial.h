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

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct Partial {
  TensorView o, lse;
};

struct MergeOptions {
  TensorView sink = {};  // f32 [H]: a logit in each row's denominator. It enters here, once: partials are made without
  std::string force = {};  // a candidate's name
};

// Writes o, f32 or of the partials' dtype, or beside partials in f32 also f16 or bf16, and, if given, lse. o (lse) may
// be the o (lse) of one of the partials itself, where o has their dtype; else outputs share no memory with what is
// read. Throws Error on a bad argument before anything is written.
//
// Sums are taken in the order of the partials, and the sink comes last: what is added are e_p = exp(lse_p - m), m the
// largest of lse_p and sink, the denominator in f64, o in f32, which is divided by the denominator at the end. So one
// partial without a sink, or beside others without keys, comes back to the bit.
void merge_attention(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                     const MergeOptions& options = {}, const Runtime& runtime = {});
// Bytes of workspace that such a call needs: none on the CPU, and on a GPU none of up to 32 partials. Reads no data.
std::size_t merge_attention_workspace(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                                      const MergeOptions& options = {}, const Runtime& runtime = {});

// Gradients of a loss whose derivative is d_o with respect to o (o's shape, f32 or the partials' dtype) and, if it is
// given, d_lse with respect to lse. gradients: for each partial the derivatives with respect to its o (its dtype) and
// its lse; dsink: f32 [H]. A view that is not given is not computed. With w_p = exp(lse_p - lse):
//   d_o_p = w_p d_o      d_lse_p = w_p (d_o . (o_p - o) + d_lse)      dsink = sum over rows of w_sink (d_lse - d_o . o)
// Partials without keys get zeros, whatever d_o holds.
void merge_attention_backward(std::span<const Partial> partials, const TensorView& d_o, const TensorView& d_lse,
                              std::span<const Partial> gradients, const TensorView& dsink,
                              const MergeOptions& options = {}, const Runtime& runtime = {});
// None on the CPU, and on a GPU none of up to 16 partials without dsink.
std::size_t merge_attention_backward_workspace(std::span<const Partial> partials, const TensorView& d_o,
                                               const TensorView& d_lse, std::span<const Partial> gradients,
                                               const TensorView& dsink, const MergeOptions& options = {},
                                               const Runtime& runtime = {});

// The candidates for such calls, and which one would run. Read no data; views may be without it.
std::vector<Candidate> explain_merge_attention(std::span<const Partial> partials, const TensorView& o,
                                               const TensorView& lse, const MergeOptions& options = {},
                                               const Runtime& runtime = {});
std::vector<Candidate> explain_merge_attention_backward(std::span<const Partial> partials, const TensorView& d_o,
                                                        const TensorView& d_lse, std::span<const Partial> gradients,
                                                        const TensorView& dsink, const MergeOptions& options = {},
                                                        const Runtime& runtime = {});

}  // namespace heddle

// Attention with a tolerance in and a proved bound out: of blocks of keys that count little for a row, the product
// with V is replaced by their mass times the mean of their values (docs/adaptive.md; the proof: docs/numerics.md).
//
// Words: as in attention.h. Rows of a kv head of a sequence are numbered i * G + g, for position i and head g of its
// group. Rows in runs of kAdaptiveRows and keys in blocks of kAdaptiveKeys, each counted from the sequence's first, are
// the pairs of which each is replaced or not.
//
// Meaning: scores, softmax and lse are those of attention.h. For a block b of n_b keys with exponentials e_j and mass
// Z_b = sum_j e_j that is replaced, sum_j e_j v_j becomes Z_b c_b, c_b the mean of the block's values. With the mean,
// nothing but what e and v have in common inside the block is lost, so that for each row
//   |o - o_exact| <= bound * max |v|      bound = sum_b min(sqrt(sum_j e_j^2 - Z_b^2 / n_b) w_b, Z_b r_b) / Z <= tol
// beside rounding. Norms are Euclidean, the maximum is over the keys of the sequence and kv head, r_b is the largest
// |v_j - c_b| and w_b at least the largest singular value of those rows, both in units of max |v|. A block is replaced
// only where each of the rows meets each of its keys, and never if a value of it is not finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "heddle/attention.h"

namespace heddle {

constexpr std::int64_t kAdaptiveRows = 12;
constexpr std::int64_t kAdaptiveKeys = 32;

// What is to happen with a row whose bound comes out above tol: its blocks are multiplied after all, the call is
// repeated as exact attention, or nothing, so that `bound` tells. Here blocks are replaced while the bound allows it,
// so that none comes out above tol, and the three give the same.
enum class OnExceed : std::uint8_t { refine, dense, report };
// "refine", "dense", "report"; Error, listing them, for another name.
OnExceed on_exceed_named(std::string_view name);

struct AdaptiveOptions {
  float tol = 1e-2f;  // above 0, in units of the largest |v|; from 2 on everything may be replaced
  OnExceed on_exceed = OnExceed::refine;
};

// o and lse as of attention_forward; bound f32 of lse's shape. replaced: uint8, contiguous, which blocks were replaced,
// for a backward. Bit j % 8 (from the lowest) of byte j / 8 is block j of a run of rows:
//   batched   [B, Hkv, N, W], N = ceil(Sq * G / kAdaptiveRows); run n of a sequence is number n
//   packed    [Hkv, N, W], N = total_q * G / kAdaptiveRows + B; run n of sequence b is number
//             cu_seqlens_q[b] * G / kAdaptiveRows + b + n
// W is at least ceil(Sk / (8 * kAdaptiveKeys)), Sk the longest sequence's (or max_seqlen_k). What lies between or
// behind runs and blocks is 0.
struct AdaptiveOutputs {
  TensorView o, lse, bound, replaced;  // all but o may be absent
};

// As attention_forward and its kin. Operands are f32, f16 or bf16, on the CPU. Not with bias, mask, draft_mask,
// dropout, a method, or a precision other than f32: a mean may count only keys that each row of a run meets.
std::size_t adaptive_attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                 const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                                 const Runtime& runtime = {});
void adaptive_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                                const AdaptiveOutputs& outputs, const AdaptiveOptions& adaptive,
                                const AttentionOptions& options, const Runtime& runtime);
std::vector<Candidate> explain_adaptive_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                                  const Runtime& runtime = {});

// Gradients of what was computed, with the o, lse and replaced that adaptive_attention_forward wrote. For the keys of a
// replaced block dP is d_o . c_b, and each of their values takes Z_b / (n_b Z) of d_o. Which blocks are replaced, and
// the bound, have no gradient. As attention_backward and its kin; `merged` is not taken.
std::size_t adaptive_attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const TensorView& replaced, const AttentionGradients& gradients,
                                                  const AttentionOptions& options, const Runtime& runtime = {});
void adaptive_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const TensorView& replaced, const TensorView& o, const TensorView& lse,
                                 const TensorView& d_o, const TensorView& d_lse, const AttentionGradients& gradients,
                                 const AttentionOptions& options, const Runtime& runtime);
std::vector<Candidate> explain_adaptive_attention_backward(const TensorView& q, const TensorView& k,
                                                           const TensorView& v, const TensorView& replaced,
                                                           const AttentionGradients& gradients,
                                                           const AttentionOptions& options,
                                                           const Runtime& runtime = {});

}  // namespace heddle

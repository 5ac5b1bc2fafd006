// Exact attention, forward and backward, over dense, packed and cached keys.
//
// Words: B sequences, H query heads, Hkv key/value heads, G = H / Hkv, Sq/Sk lengths, D/Dv head sizes (1..256).
//   batched   q [B, Sq, H, D]      k [B, Sk, Hkv, D]   v [B, Sk, Hkv, Dv]   o [B, Sq, H, Dv]   lse [B, H, Sq]
//   packed    q [total_q, H, D]    with cu_seqlens_q;  o [total_q, H, Dv];  lse [H, total_q];  k, v likewise
//   paged     k [pages, page_size, Hkv, D]   v [pages, page_size, Hkv, Dv]  with page_table
// q, k, v, o share one dtype (f32, f16 or bf16), but for an o in f32 (float32_out); lse is f32. Strides are free,
// except that an output must not overlap itself, another, or what is read. k and v may also be f8e4m3 beside 16-bit q
// and o (a cache in 8 bits), or q, k and v all f8e4m3 with o f16 or bf16; a stored x then stands for x * scale
// (q_scale, k_scale, v_scale), and every formula is about what it stands for.
//
// Meaning (the same on every backend):
//   s_ij = scale * q_i . k_j;  s = softcap * tanh(s / softcap) if softcap > 0;  s += -slope_h * |i + off - j|;
//   s += bias_ij;  masks then remove pairs;  p = softmax_j(s);  o_i = sum_j dropout(p_ij) v_j;
//   lse_i = ln(sum_j exp(s_ij) + exp(sink_h)), before dropout.
// off = 0 for Causal::top_left, else Sk - Sq (lengths as used). In a piece of a longer problem (q_offset, key_offset)
// off is q_offset - key_offset of the sequence, whatever the lengths. Where rows or keys stand for several positions
// (q_step, key_step), causality and window have q_step * i for i and key_step * j for j. A row without any key gives
// o = 0 and lse = -inf (with a sink, lse = sink), and no gradient for q, k and v. FlashAttention: Dao et al., arXiv
// 2205.14135; 2307.08691.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

// Which corner the causal diagonal starts from. `j <= i` for top_left, `j <= i + Sk - Sq` for bottom_right.
enum class Causal : std::uint8_t { none, top_left, bottom_right };

// Bernoulli dropout of the probabilities, Philox4x32-10 keyed by `seed`, counted by (offset, batch, head, i, j): the
// same mask in forward and backward, on every backend, whatever the tiling. i and j are positions in a piece of a
// longer problem, whose pieces so have the whole's mask; the sequence and the head are the call's.
struct Dropout {
  float p = 0.0f;  // probability of dropping, in [0, 1)
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

// How operands are multiplied. f32 and tf32 are about f32 operands on a GPU; 16-bit operands and the CPU do not ask.
// f32: as f32 arithmetic rounds, by three tf32 products (3xTF32: Ootomo and Yokota, arXiv 2203.03341). tf32: one
// product of operands of 11 bits. int8_qk: 16-bit q and k are rounded to 8 bits for Q K^T, forward only, by the
// candidates that do so and no other; less accurate, faster than mma.sync in 16 bits from some thousand keys on. q has
// a scale for each row, k one for 16 keys, after a number near each channel's mean is taken off (SageAttention: Zhang
// et al., arXiv 2410.02367; 2411.10958); P V is in 16 bits. What it costs is in docs/numerics.md.
enum class Precision : std::uint8_t { f32, tf32, int8_qk };

struct AttentionOptions {
  std::optional<float> scale;  // default 1 / sqrt(D)
  Causal causal = Causal::none;
  std::int64_t window_left = -1;   // keys j >= i + off - window_left; -1: open
  std::int64_t window_right = -1;  // keys j <= i + off + window_right; -1: open
  float softcap = 0.0f;            // 0: none
  TensorView alibi_slopes;         // f32 [H] or [B, H]
  TensorView bias;                 // q's dtype or f32, [B|1, H|1, Sq|1, Sk|1]; -inf removes a pair
  TensorView mask;                 // boolean, [B|1, H|1, Sq|1, Sk|1]; true = attend
  TensorView sink;                 // f32 [H]: a logit in each row's denominator, not scaled
  // int32 [B, Sq], Sq <= 32, for drafts to verify: bit t of entry [b, i] lets row i attend the key at position
  // Sk - Sq + t (lengths as used: the last Sq keys are the draft's own). Earlier keys are not its business.
  TensorView draft_mask;
  Dropout dropout;

  // Packed sequences: int32 [B + 1], from 0 to the total, never decreasing. Bias and mask are then indexed by the
  // position inside each sequence and have extents max_seqlen_q, max_seqlen_k (or 1).
  TensorView cu_seqlens_q, cu_seqlens_k;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // upper bounds; 0: found from cu_seqlens
  TensorView seqused_q, seqused_k;                  // int32 [B]: rows and keys really in use, at most the length

  // Cached keys. page_table: int32 [B, max_pages], page of each page_size keys; cache_batch_idx: int32 [B], the row of
  // k and v (not paged) that each sequence reads; leftpad: int32 [B], slots to skip before the first key.
  TensorView page_table, cache_batch_idx, cache_leftpad;

  // A piece of a longer problem (docs/partial.md): int32 [B], positions of the first row and of the first key of each
  // sequence; where one is given, the other is 0 if it is not. Row i stands at position q_offset[b] + i and key j at
  // key_offset[b] + j, below 2^31. Causality, window, ALiBi and dropout are about these positions: causal is none or
  // top_left, which lets a row attend the keys at its own position and before. Bias and mask (and dbias) have the
  // piece's rows and the longer problem's columns: key j's is key_offset[b] + j, and there are as many as the caller
  // has, the same number for both, or 1. Not beside draft_mask.
  TensorView q_offset, key_offset;
  // Rows and keys that stand for several positions each (docs/partial.md): row i stands at position q_offset[b] +
  // q_step * i and key j at key_offset[b] + key_step * j, below 2^31. From 1 on. One above 1 makes the call a piece,
  // its offsets 0 where they are not given, and is not taken beside alibi_slopes, bias, mask, dropout and draft_mask.
  std::int64_t q_step = 1, key_step = 1;
  bool float32_out = false;  // o and d_o are f32, whatever q's dtype: o is then not rounded to it

  // f32, beside f8e4m3 operands: the shape of q (k, v) without its last extent, each extent that or 1. So [1, 1, 1] is
  // one number, [B, 1, H] one for each head of each sequence, [B, Sq, H] one for each row. Not given: 1.
  TensorView q_scale, k_scale, v_scale;

  Precision precision = Precision::f32;
  bool batch_invariant = false;  // a row's bits do not depend on the rest of the batch, also where keys are split
  bool deterministic = false;    // backward: bitwise repeatable. The CPU is so always
  std::string method;            // "" (free choice), "flash" or "baseline" (full score matrix)
  std::string force;             // "": choose; else one candidate's name (see explain_attention)
};

// Scratch bytes that attention_forward needs for these arguments. Checks them as the operation does; data is not read,
// except index data on the CPU, and views may be without it (heddle/tensor.h): a call can be planned before its tensors
// are allocated.
std::size_t attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                        const AttentionOptions& options, const Runtime& runtime = {});

// Writes o and, if given, lse. Throws Error on a bad argument before anything is written.
void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                       const TensorView& lse, const AttentionOptions& options, const Runtime& runtime);

// Gradients to write. A view that is not given is not computed. Each has its tensor's shape; dq, dk, dv have q's dtype
// or f32, dbias has bias's shape and dtype (summed over broadcast extents), dsink is f32 [H].
struct AttentionGradients {
  TensorView dq, dk, dv, dbias, dsink;
  // Those of dq, dk and dv that are f32 are added to: each element once, by the call's own sum, so that calls that come
  // one after another are summed in their order. What has 16 bits is written, as dbias and dsink are; on the CPU, dq,
  // dk and dv must all be f32 then.
  bool accumulate = false;
  // o and lse are those of a longer problem, of which this call is a piece: p_ij = exp(s_ij - lse_i), and dq is what
  // the piece's keys add to the longer problem's, dk and dv what its rows add. The sink is the one that the merge had,
  // and dsink that of all these rows' keys, whichever piece is asked. A row whose lse is 2^17 or more from 0 has lost
  // in float32 how many keys share it, which a piece cannot find again: the gradients of such a row are not exact.
  bool merged = false;
};

std::size_t attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionGradients& gradients, const AttentionOptions& options,
                                         const Runtime& runtime = {});

// Gradients of a loss whose derivative is d_o with respect to o and, if d_lse is given (f32, lse's shape), d_lse with
// respect to lse. o and lse are those that attention_forward wrote with the same options. Paged keys, cache_batch_idx
// and leftpad have no backward and are refused.
void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                        const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                        const AttentionGradients& gradients, const AttentionOptions& options, const Runtime& runtime);

enum class Pass : std::uint8_t { forward, backward };

// The candidates for a call with these arguments, and which one would run. Reads no data but index data on the CPU;
// views may be without data.
std::vector<Candidate> explain_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionOptions& options, const Runtime& runtime = {});
std::vector<Candidate> explain_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const AttentionGradients& gradients, const AttentionOptions& options,
                                                  const Runtime& runtime = {});

}  // namespace heddle

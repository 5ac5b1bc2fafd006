// From products to probabilities: scale, options, masks, softmax, over a tile of 16 rows and 8 * kColumns keys.
//
// A warp's tile s[kColumns][4] as the products leave it, mma and wgmma alike: s[n][c] and s[n][2 + c] are rows lane / 4
// and lane / 4 + 8, key 8 n + 2 (lane % 4) + c.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/attention/softcap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention_decode/address.cuh"
#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

// The two rows of a tile that a thread works on, and what they may attend.
struct TileRows {
  int i[2], h[2];        // query position, query head
  int begin[2], end[2];  // keys by causality and window; none for rows that do not exist

  // row: the first one of the tile, among the rows of the unit's kv head.
  __device__ TileRows(const Params& p, const Piece& piece, int kv_head, int row) {
    const int group = static_cast<int>(p.problem.G), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_unit = row + lane / 4 + 8 * r, n = piece.row + in_unit;
      i[r] = p.plan.by_group.quotient(n);
      h[r] = kv_head * group + n - i[r] * group;
      const bool exists = in_unit < p.plan.rows && i[r] < piece.sq;
      begin[r] = p.band.begin(piece.off, i[r]);
      end[r] = exists ? min(p.band.end(piece.off, i[r]), piece.sk) : 0;
    }
  }
};

template <int kColumns>
__device__ __forceinline__ void mask_band(const TileRows& rows, int first_key, float (&s)[kColumns][4]) {
  const int key = first_key + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto length = static_cast<unsigned>(max(rows.end[r] - rows.begin[r], 0));
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // As keep_keys() has it, written out: called here, the compiler makes other code of it.
        if (static_cast<unsigned>(key + 8 * n + c - rows.begin[r]) >= length) s[n][2 * r + c] = -INFINITY;
      }
    }
  }
}

// Softcap, ALiBi, bias, mask, draft mask. s: scaled. Pairs outside the band are left to mask_band. The
// elements go through `stash`, a word for each of a lane's, one after the other: there are no registers for all at
// once.
template <int kColumns>
__device__ __forceinline__ void apply_options(const Params& p, const Piece& piece, const TileRows& rows, int first_key,
                                              float* stash, float (&s)[kColumns][4]) {
  const AttentionProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32, b = piece.sequence, draft = piece.sk - piece.sq;
  stash += lane;
#pragma unroll
  for (int e = 0; e < 4 * kColumns; ++e) stash[32 * e] = s[e / 4][e % 4];
#pragma unroll 1
  for (int e = 0; e < 4 * kColumns; ++e) {
    const bool lower = e % 4 < 2;
    const int i = lower ? rows.i[0] : rows.i[1], h = lower ? rows.h[0] : rows.h[1];
    const int j = first_key + lane % 4 * 2 + e / 4 * 8 + e % 2;
    if (j < (lower ? rows.begin[0] : rows.begin[1]) || j >= (lower ? rows.end[0] : rows.end[1])) continue;
    float x = stash[32 * e];
    if (problem.softcap > 0.0f) {
      x = capped_by_fma(x, 2.0f * kLog2e / problem.softcap, problem.softcap);
    }
    if (problem.alibi.data != nullptr) {
      const float slope =
          reinterpret_cast<const float*>(problem.alibi.data)[b * problem.alibi.stride_b + h * problem.alibi.stride_h];
      x = fmaf(-slope, fabsf(static_cast<float>(i + piece.off - j)), x);
    }
    if (problem.bias.data != nullptr) {
      const float bias = load_value(problem.bias, b, h, i, j);
      x = bias == -INFINITY ? bias : x + bias;  // a removed pair's score may be NaN
    }
    if (problem.mask.data != nullptr && !load_flag(problem.mask, b, h, i, j)) x = -INFINITY;
    if (problem.draft_mask.data != nullptr && j >= draft) {
      const int bits = problem.draft_mask[b * problem.draft_mask_stride + i];
      if ((bits >> (j - draft) & 1) == 0) x = -INFINITY;
    }
    stash[32 * e] = x;
  }
#pragma unroll
  for (int e = 0; e < 4 * kColumns; ++e) s[e / 4][e % 4] = stash[32 * e];
}

// Turns s into exp(s - max); returns by `correction` what O must be multiplied with. Without `second` rows lane / 4 +
// 8 do not exist: theirs become 0.
template <int kColumns>
__device__ __forceinline__ void softmax(float (&s)[kColumns][4], RowState& state, float (&correction)[2],
                                        bool second = true) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && !second) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) s[n][2] = s[n][3] = 0.0f;
      correction[1] = 1.0f;
      break;
    }
    float tops[2];  // two chains, half as long
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float larger = fmaxf(s[n][2 * r], s[n][2 * r + 1]);
      tops[n % 2] = n < 2 ? larger : fmaxf(tops[n % 2], larger);
    }
    const float top = largest_of_quad(fmaxf(tops[0], tops[1]));
    const float before = state.max[r];
    if (top > before + kRescaleLog2 / kLog2e) state.max[r] = top;
    const float base = state.max[r] == -INFINITY ? 0.0f : state.max[r];
    correction[r] = state.max[r] == -INFINITY ? 1.0f : exp_of_difference(before, base);
    float sums[2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) s[n][2 * r + c] = exp_of_difference(s[n][2 * r + c], base);
      const float two = s[n][2 * r] + s[n][2 * r + 1];
      sums[n % 2] = n < 2 ? two : sums[n % 2] + two;
    }
    state.sum[r] = state.sum[r] * correction[r] + (sums[0] + sums[1]);
  }
}

}  // namespace heddle::cuda::sm90::attention_decode

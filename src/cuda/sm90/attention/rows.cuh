// The rows that a consumer's thread works on, and what is done to all of a row: the band, and lse at its end.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention/params.h"
#include "cuda/sm90/attention/positions.cuh"
#include "cuda/sm90/attention/tiles.h"
#include "cuda/sm90/attention/work.cuh"

namespace heddle::cuda::sm90::attention {

// Which of its warpgroup's rows this thread works on: lane_row and lane_row + 8. first: the position of row 0.
struct ThreadRows {
  int first, lane_row;
  __device__ int position(const Params& p, int r) const { return first + ((lane_row + 8 * r) * p.pack_inverse >> 16); }
  __device__ int head(const Params& p, const Work& w, int r) const {
    const int row = lane_row + 8 * r;
    return (w.h - (row * p.pack_inverse >> 16)) * p.pack + row;
  }
};

// Row r's largest element of s: with those of the other threads of its quad.
template <int kCount>
__device__ __forceinline__ float row_maximum(const float (&s)[kCount], int r) {
  float top0 = fmaxf(s[2 * r], s[2 * r + 1]), top1 = fmaxf(s[2 * r + 4], s[2 * r + 5]);
#pragma unroll
  for (int i = 8; i < kCount; i += 8) {
    top0 = fmaxf(top0, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    top1 = fmaxf(top1, fmaxf(s[i + 2 * r + 4], s[i + 2 * r + 5]));
  }
  return largest_of_quad(fmaxf(top0, top1));
}

// Causality, a window, and the end of the keys: each row attends one run of keys.
template <class C>
__device__ inline void mask_band(const Params& p, const Work& w, const ThreadRows& rows, int k_tile,
                                 float (&s)[C::kTileK / 2]) {
  const int column = k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = rows.position(p, r);
    int begin, end;
    if constexpr (C::kIsPiece) {
      const Interval<int> reach = PieceBand{p, w.off}.reach(min(position, w.used_rows - 1));
      begin = reach.begin;
      end = position < w.used_rows ? min(reach.end, w.keys) : 0;
    } else {
      const int i = position + w.off;
      begin = max(i - p.left, 0);
      end = position < w.used_rows ? min(i + p.right + 1, w.keys) : 0;
    }
    keep_keys<C::kTileK / 8>(begin, static_cast<unsigned>(max(end - begin, 0)), column,
                             [&](int n) { return &s[4 * n + 2 * r]; });
  }
}

// Writes lse; returns by `inverse` what O must be multiplied with. kInLog2: max is in log2 units, else natural.
template <bool kInLog2 = true>
__device__ inline void finish_rows(const Params& p, const Work& w, const ThreadRows& rows, const RowState& state,
                                   float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = sum_of_quad(state.sum[r]), base = kInLog2 ? state.max[r] * kLn2 : state.max[r];
    const int position = rows.position(p, r), head = rows.head(p, w, r);
    const bool exists = rows.lane_row + 8 * r < p.positions * p.pack && position < w.rows;
    inverse[r] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    if (p.sink != nullptr && exists && position < w.used_rows) {
      // The sink joins the sum. Both are taken relative to the larger logit, and the sink itself in no other unit: the
      // largest numbers have none in log2.
      const float sink = p.sink[head * p.sink_stride];
      const float above = kInLog2 ? fmaf(sink, kLog2e, -state.max[r]) : (sink - state.max[r]) * kLog2e;
      if (above > 0.0f) {
        const float factor = ptx::exp2_approx(-above);
        sum = fmaf(sum, factor, 1.0f);
        inverse[r] = __fdividef(factor, sum);
        base = sink;
      } else if (sink != -INFINITY) {  // NaN too
        sum += ptx::exp2_approx(above);
        inverse[r] = __fdividef(1.0f, sum);
      }
    }
    if (p.lse != nullptr && exists && threadIdx.x % 4 == 0) {
      p.lse[w.sequence * p.lse_stride_b + head * p.lse_stride_h + (w.q_row + position) * p.lse_stride_s] =
          sum == 0.0f ? -INFINITY : base + __logf(sum);
    }
  }
}

}  // namespace heddle::cuda::sm90::attention

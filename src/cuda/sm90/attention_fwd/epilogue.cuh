// The end of a tile: O normalised, rounded and written from the registers.
#pragma once

#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention/rows.cuh"
#include "cuda/sm90/attention/staging.cuh"
#include "cuda/sm90/attention_fwd/config.h"

namespace heddle::cuda::sm90::attention_fwd {

using attention::ThreadRows;

// O in f32, of pieces that are merged before they are rounded: from the registers, four lanes write 32 bytes of a row
// together. warp_row: the first of the warp's 16.
template <class C>
__device__ void store_floats(const Params& p, const Work& w, int first, int warp_row,
                             const float (&o)[C::kValueSize / 2], const float (&inverse)[2]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const ThreadRows row{first, warp_row + lane / 4 + 8 * n};
    const int position = row.position(p, 0);
    if (row.lane_row >= p.positions * p.pack || position >= w.rows) continue;
    float* const to = static_cast<float*>(p.o) + w.sequence * p.o_stride_b + (w.q_row + position) * p.o_stride_s +
                      row.head(p, w, 0) * p.o_stride_h + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < C::kValueSize / 8; ++j) {
      if (8 * j >= p.Dv) continue;
      *reinterpret_cast<float2*>(to + 8 * j) =
          make_float2(o[4 * j + 2 * n] * inverse[n], o[4 * j + 2 * n + 1] * inverse[n]);
    }
  }
}

// A warp's 16 rows of O through shared memory, so that they go out in runs of 128 bytes. warp_row: the first of them.
template <class C>
__device__ void store_rows(const Params& p, typename C::Element (&staging)[16][kPanel], const Work& w, int first,
                           int warp_row, const float (&o)[C::kValueSize / 2], const float (&inverse)[2]) {
  using T = typename C::Element;
  if constexpr (C::kIsPiece) {
    if (p.float_out) return store_floats<C>(p, w, first, warp_row, o, inverse);
  }
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32);
  const int chunk = lane % 8;  // of 16 bytes; this lane writes those of rows lane / 8 + 4 n
  T* to[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const ThreadRows row{first, warp_row + lane / 8 + 4 * n};
    const int position = row.position(p, 0);
    const bool exists = row.lane_row < p.positions * p.pack && position < w.rows;
    to[n] = !exists ? nullptr
                    : static_cast<T*>(p.o) + w.sequence * p.o_stride_b + (w.q_row + position) * p.o_stride_s +
                          row.head(p, w, 0) * p.o_stride_h + 8 * chunk;
  }
#pragma unroll
  for (int panel = 0; panel < (C::kValueSize + kPanel - 1) / kPanel; ++panel) {
    attention::stage_panel(staging, o + 32 * panel, C::kValueSize / 2 - 32 * panel, inverse[0], inverse[1], lane);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 words = attention::staged(staging, lane / 8 + 4 * n, chunk);
      if (to[n] != nullptr && panel * kPanel + 8 * chunk < p.Dv)
        *reinterpret_cast<uint4*>(to[n] + panel * kPanel) = words;
    }
    __syncwarp();
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

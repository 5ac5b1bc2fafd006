// The end of a tile: lse, and O normalised, rounded and written from the registers.
#pragma once

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

// Running statistics of the two rows, 8 apart, that a thread shares with three others. max is in log2 units, after the
// scale; sum counts this thread's columns only.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

// Where a warpgroup's row belongs. first: the position of its row 0.
struct OutputRow {
  int position, head;
  bool exists;
  __device__ OutputRow(const Params& p, int first, int h, int row)
      : position(first + (row * p.pack_inverse >> 16)),
        head((h - (row * p.pack_inverse >> 16)) * p.pack + row),
        exists(row < p.positions * p.pack && position < p.Sq) {}
};

// Writes lse; returns by `inverse` what O must be multiplied with. lane_row: this thread's first row.
__device__ inline void finish_rows(const Params& p, const Work& w, int first, int lane_row, const RowState& state,
                                   float (&inverse)[2]) {
  constexpr float kLn2 = 0.693147180559945309f, kLog2e = 1.44269504088896341f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r], max = state.max[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const OutputRow row(p, first, w.h, lane_row + 8 * r);
    if (p.sink != nullptr && row.exists) {
      // The sink joins the sum; the common factor 2^max is the larger of both, so that nothing overflows.
      const float sink = p.sink[row.head * p.sink_stride] * kLog2e;
      const float top = fmaxf(max, sink);
      if (top > -INFINITY) {
        sum = sum * ptx::exp2_approx(max - top) + ptx::exp2_approx(sink - top);
        inverse[r] = __fdividef(ptx::exp2_approx(max - top), sum);
        max = top;
      } else {
        inverse[r] = 0.0f;
      }
    } else {
      inverse[r] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    }
    if (p.lse != nullptr && row.exists && threadIdx.x % 4 == 0) {
      p.lse[w.b * p.lse_stride_b + row.head * p.lse_stride_h + row.position * p.lse_stride_s] =
          sum == 0.0f ? -INFINITY : max * kLn2 + __logf(sum);
    }
  }
}

// A warp's 16 rows of O through shared memory, so that they go out in runs of 128 bytes. warp_row: the first of them.
template <class C>
__device__ void store_rows(const Params& p, typename C::Element (&staging)[16][kPanel], const Work& w, int first,
                           int warp_row, const float (&o)[C::kValueSize / 2], const float (&inverse)[2]) {
  using T = typename C::Element;
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32);
  const int chunk = lane % 8;  // of 16 bytes; this lane writes those of rows lane / 8 + 4 n
  T* to[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const OutputRow row(p, first, w.h, warp_row + lane / 8 + 4 * n);
    to[n] = row.exists ? static_cast<T*>(p.o) + w.b * p.o_stride_b + row.position * p.o_stride_s +
                             row.head * p.o_stride_h + 8 * chunk
                       : nullptr;
  }
#pragma unroll
  for (int panel = 0; panel < (C::kValueSize + kPanel - 1) / kPanel; ++panel) {
    // Lanes 0-15 name the rows of the left 8 columns, 16-31 of the right. Chunk c of row r lies at chunk c ^ (r % 8).
#pragma unroll
    for (int j = 0; j < 4 && 4 * panel + j < C::kValueSize / 16; ++j) {
      const float* d = o + 32 * panel + 8 * j;
      ptx::store_matrix_x4(
          &staging[lane % 16][8 * ((2 * j + lane / 16) ^ (lane % 8))],
          ptx::pack2<T>(d[0] * inverse[0], d[1] * inverse[0]), ptx::pack2<T>(d[2] * inverse[1], d[3] * inverse[1]),
          ptx::pack2<T>(d[4] * inverse[0], d[5] * inverse[0]), ptx::pack2<T>(d[6] * inverse[1], d[7] * inverse[1]));
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = lane / 8 + 4 * n;
      const uint4 words = *reinterpret_cast<const uint4*>(&staging[r][8 * (chunk ^ (r % 8))]);
      if (to[n] != nullptr && panel * kPanel + 8 * chunk < p.Dv)
        *reinterpret_cast<uint4*>(to[n] + panel * kPanel) = words;
    }
    __syncwarp();
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

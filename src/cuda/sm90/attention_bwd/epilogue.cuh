// Gradients on their way from registers to memory.
#pragma once

#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention/staging.cuh"
#include "cuda/sm90/attention_bwd/config.h"

namespace heddle::cuda::sm90::attention_bwd {

// A warp's 16 rows of a product, times `factor`, rounded, through shared memory, so that they go out in runs of 128
// bytes. to: the first row; stride: of rows, in elements; size: columns that exist; rows: rows that exist.
template <class T, int kCount>
__device__ __forceinline__ void store_rows(T (&staging)[16][kPanel], std::byte* to, std::int64_t stride, int size,
                                           int rows, const float (&d)[kCount], float factor) {
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32), chunk = lane % 8;
  T* const out = reinterpret_cast<T*>(to);
#pragma unroll
  for (int panel = 0; panel < (kCount + 31) / 32; ++panel) {
    attention::stage_panel(staging, d + 32 * panel, kCount - 32 * panel, factor, factor, lane);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = lane / 8 + 4 * n, column = panel * kPanel + 8 * chunk;
      const uint4 words = attention::staged(staging, r, chunk);
      if (r < rows && column < size) *reinterpret_cast<uint4*>(out + r * stride + column) = words;
    }
    __syncwarp();
  }
}

// The same without rounding, from the registers: four lanes write 32 bytes of a row together. What is added to gets the
// sum as it is rounded, so no FMA.
template <int kCount>
__device__ __forceinline__ void store_floats(std::byte* to, std::int64_t stride, int size, int rows,
                                             const float (&d)[kCount], float factor, bool accumulate) {
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32), first = 2 * (lane % 4);
  float* const out = reinterpret_cast<float*>(to) + first;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int r = lane / 4 + 8 * n;
      if (r >= rows || 8 * j + first >= size) continue;
      auto* const at = reinterpret_cast<float2*>(out + r * stride + 8 * j);
      float2 x = make_float2(__fmul_rn(d[4 * j + 2 * n], factor), __fmul_rn(d[4 * j + 2 * n + 1], factor));
      if (accumulate) {
        const float2 before = *at;
        x = make_float2(__fadd_rn(before.x, x.x), __fadd_rn(before.y, x.y));
      }
      *at = x;
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

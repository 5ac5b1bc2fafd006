// Gradients on their way from registers to memory.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/recomputed.cuh"
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
    // Lanes 0-15 name the rows of the left 8 columns, 16-31 of the right. Chunk c of row r lies at chunk c ^ (r % 8).
#pragma unroll
    for (int j = 0; j < 4 && 32 * panel + 8 * j < kCount; ++j) {
      const float* x = d + 32 * panel + 8 * j;
      ptx::store_matrix_x4(&staging[lane % 16][8 * ((2 * j + lane / 16) ^ (lane % 8))],
                           ptx::pack2<T>(x[0] * factor, x[1] * factor), ptx::pack2<T>(x[2] * factor, x[3] * factor),
                           ptx::pack2<T>(x[4] * factor, x[5] * factor), ptx::pack2<T>(x[6] * factor, x[7] * factor));
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = lane / 8 + 4 * n, column = panel * kPanel + 8 * chunk;
      const uint4 words = *reinterpret_cast<const uint4*>(&staging[r][8 * (chunk ^ (r % 8))]);
      if (r < rows && column < size) *reinterpret_cast<uint4*>(out + r * stride + column) = words;
    }
    __syncwarp();
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

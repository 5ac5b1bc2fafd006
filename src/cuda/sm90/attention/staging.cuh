// A warp's 16 rows of a product on their way out: through shared memory, a panel at a time, so that they leave in runs
// of 128 bytes.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/sm90/attention/tiles.h"

namespace heddle::cuda::sm90::attention {

// The accumulators d of a panel, of which `count` exist, times `upper` in the first eight rows and `lower` in the
// others. Lanes 0-15 name the rows of the left 8 columns, 16-31 of the right. Chunk c of row r lies at chunk c ^ (r %
// 8).
template <class T>
__device__ __forceinline__ void stage_panel(T (&staging)[16][kPanel], const float* d, int count, float upper,
                                            float lower, int lane) {
#pragma unroll
  for (int j = 0; j < 4 && 8 * j < count; ++j) {
    const float* x = d + 8 * j;
    ptx::store_matrix_x4(&staging[lane % 16][8 * ((2 * j + lane / 16) ^ (lane % 8))],
                         ptx::pack2<T>(x[0] * upper, x[1] * upper), ptx::pack2<T>(x[2] * lower, x[3] * lower),
                         ptx::pack2<T>(x[4] * upper, x[5] * upper), ptx::pack2<T>(x[6] * lower, x[7] * lower));
  }
}

// Chunk `chunk` of row r, 16 bytes.
template <class T>
__device__ __forceinline__ uint4 staged(const T (&staging)[16][kPanel], int r, int chunk) {
  return *reinterpret_cast<const uint4*>(&staging[r][8 * (chunk ^ (r % 8))]);
}

}  // namespace heddle::cuda::sm90::attention

// The online softmax of a warp's 16 rows over one tile of keys after the other, and products with values by mma.sync.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse_fwd {

// So that the largest score is the one after scaling, and what is masked afterwards stays so: scores to be scaled by
// the result, which is positive.
template <int kBlocks>
__device__ __forceinline__ float positive_scale(float (&s)[1][kBlocks][4], float scale) {
  if (scale > 0.0f) return scale;
#pragma unroll
  for (auto& block : s[0]) {
#pragma unroll
    for (float& x : block) x *= scale;
  }
  return 1.0f;
}

// Scores of a tile of keys, -inf where masked, to weights as the second product takes them. O and the statistics follow
// the new maximum. The whole warp.
template <class T, int kBlocks, int kColumns>
__device__ __forceinline__ void weigh(float (&s)[1][kBlocks][4], float scale, RowState& state, float (&o)[kColumns][4],
                                      std::uint32_t (&weights)[kBlocks / 2][4]) {
  float correction[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) top = fmaxf(top, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
    top = fmaxf(state.max[r], largest_of_quad(top) * scale);
    const float base = top == -INFINITY ? 0.0f : top;
    correction[r] = ptx::exp2_approx(state.max[r] - base);
    state.max[r] = top;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[0][n][2 * r + c];
        x = ptx::exp2_approx(fmaf(x, scale, -base));
        sum += x;
      }
    }
    state.sum[r] = state.sum[r] * correction[r] + sum;
  }
  if (__any_sync(sparse::kAll, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
    for (auto& x : o) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= correction[e / 2];
    }
  }
#pragma unroll
  for (int step = 0; step < kBlocks / 2; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&from)[4] = s[0][2 * step + i / 2];
      weights[step][i] = ptx::pack2<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
  }
}

// O += weights times the values from row `first` on, a multiple of 8. kWhole: all rows meet all keys; where not,
// attended: as attended_keys() has it.
template <class T, bool kWhole, class Values, int kSteps, int kColumns>
__device__ __forceinline__ void add_values(float (&o)[kColumns][4], const std::uint32_t (&weights)[kSteps][4],
                                           std::uint32_t attended, const Values& values, unsigned first = 0) {
  const unsigned lane = threadIdx.x % sparse::kWarp;
  const std::uint32_t v_at = ptx::shared_address(&values) + first * Values::kRowBytes;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    // What no row meets may be anything, and zero times NaN is not zero.
    const std::uint32_t low = kWhole ? 0 : halves(attended >> (4 * step)),
                        high = kWhole ? 0 : halves(attended >> (4 * step + 2));
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
      std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
      ptx::load_matrix_x4_transposed(v, v_at + Values::offset(16 * step + lane % 16, 2 * n + lane / 16));
      if constexpr (!kWhole) {
        v[0] &= low, v[1] &= high;
        v[2] &= low, v[3] &= high;
      }
      ptx::mma_16816<T>(o[2 * n], weights[step], v[0], v[1]);
      ptx::mma_16816<T>(o[2 * n + 1], weights[step], v[2], v[3]);
    }
  }
}

}  // namespace heddle::cuda::sparse_fwd

// dQ from its sums: scaled, rounded, and put into rows. A block takes 64 rows of a head.
#pragma once

#include "cuda/sm90/attention_bwd/epilogue.cuh"

namespace heddle::cuda::sm90::attention_bwd {

constexpr int kDqThreads = 128, kDqRows = 64;

template <class T, int kHeadSize>
__global__ void __launch_bounds__(kDqThreads) dq_kernel(const __grid_constant__ Params p) {
  __shared__ alignas(16) T staging[4][16][kPanel];
  const AttentionBackwardProblem& problem = p.problem;
  const std::int64_t blocks = (problem.Sq + kDqRows - 1) / kDqRows, unit = blockIdx.x / blocks;
  const std::int64_t b = unit / problem.H, h = unit - b * problem.H, row = (blockIdx.x - unit * blocks) * kDqRows;
  const Sequence s = problem.sequence(b);
  if (row >= s.q_rows) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t first = h * p.rows_per_head + any::attention_bwd_rows::first_row(problem, b, s) + row;
  const float4* from = reinterpret_cast<const float4*>(p.dq + first * kHeadSize) + warp * 256 + threadIdx.x % 32;
#pragma unroll 1
  for (int panel = 0; panel < kHeadSize / kPanel; ++panel, from += kDqRows * kPanel / 4) {
    float d[32];
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const float4 x = from[32 * m];
      d[4 * m] = x.x, d[4 * m + 1] = x.y, d[4 * m + 2] = x.z, d[4 * m + 3] = x.w;
    }
    store_rows<T>(staging[warp],
                  problem.dq.at(b, s.q_begin + row + 16 * warp, h) + panel * kPanel * static_cast<int>(sizeof(T)),
                  problem.dq.stride_s, static_cast<int>(problem.D) - panel * kPanel,
                  static_cast<int>(s.q_rows - row) - 16 * warp, d, problem.scale);
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

// Gradients from their sums in f32: scaled, rounded to what is asked for, and put into rows or added to them. A block
// takes 64 rows of a head.
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/sm90/attention_bwd/epilogue.cuh"
#include "cuda/sm90/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm90::attention_bwd {

constexpr int kSumThreads = 128, kSumRows = 64;

template <class T, int kColumns>
__global__ void __launch_bounds__(kSumThreads)
    round_sums_kernel(const __grid_constant__ Params p, const __grid_constant__ Sums sums) {
  __shared__ alignas(16) T staging[4][16][kPanel];
  wait_for_previous_grid();
  const AttentionBackwardProblem& problem = p.problem;
  const std::int64_t blocks = (sums.longest + kSumRows - 1) / kSumRows, unit = blockIdx.x / blocks;
  const std::int64_t b = unit / sums.heads, h = unit - b * sums.heads, row = (blockIdx.x - unit * blocks) * kSumRows;
  const Sequence s = problem.stored_sequence(b);
  const std::int64_t rows = sums.of_keys ? s.k_rows : s.q_rows, begin = sums.of_keys ? s.k_begin : s.q_begin;
  if (row >= rows) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t first =
      h * sums.rows_per_head + row +
      (sums.of_keys ? first_key_row(problem, b, s) : any::attention_bwd_rows::first_row(problem, b, s));
  const float4* from = reinterpret_cast<const float4*>(sums.data + first * kColumns) + warp * 256 + threadIdx.x % 32;
#pragma unroll 1
  for (int panel = 0; panel < kColumns / kPanel; ++panel, from += kSumRows * kPanel / 4) {
    float d[32] = {};
#pragma unroll 1
    for (int part = 0; part < sums.parts; ++part) {
      const float4* const of_part = from + part * (sums.heads * sums.rows_per_head * (kColumns / 4));
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const float4 x = of_part[32 * m];
        d[4 * m] += x.x, d[4 * m + 1] += x.y, d[4 * m + 2] += x.z, d[4 * m + 3] += x.w;
      }
    }
    std::byte* const to = sums.to.at(b, begin + row + 16 * warp, h);
    const int size = sums.size - panel * kPanel, left = static_cast<int>(rows - row) - 16 * warp;
    if (sums.to.dtype == DType::f32) {
      store_floats(to + panel * kPanel * static_cast<int>(sizeof(float)), sums.to.stride_s, size, left, d, sums.factor,
                   problem.accumulate);
    } else {
      store_rows<T>(staging[warp], to + panel * kPanel * static_cast<int>(sizeof(T)), sums.to.stride_s, size, left, d,
                    sums.factor);
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

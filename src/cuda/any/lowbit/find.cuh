// What quantisation asks of a whole matrix: its largest magnitude, the first weight that is not as it must be, and
// whether an importance is one.
#pragma once

#include "cuda/any/lowbit/encode.cuh"

namespace heddle::cuda::any::lowbit {

// The only thing that a matrix's own global scale needs of it: so nothing but reading, of four pieces at once.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ QuantizeProblem p, Scratch* scratch, bool wide) {
  constexpr int kAtOnce = 4, kPiece = 8;
  Range range;
  for (Units units(p.out.N, static_cast<int>((p.out.K + kAtOnce * kPiece - 1) / (kAtOnce * kPiece))); units.left();
       units.next()) {
    const std::int64_t k = std::int64_t{(*units).unit} * kAtOnce * kPiece;
    float w[kAtOnce][kPiece];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t left = max(min(p.out.K - k - i * kPiece, std::int64_t{kPiece}), std::int64_t{0});
      load_weights(p.weights, wide, (*units).row, k + i * kPiece, static_cast<int>(left), w[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (const float x : w[i]) range.high = larger(range.high, fabsf(x));
    }
  }
  find_largest(largest_in(range), &scratch->largest);
}

__global__ void __launch_bounds__(kThreads)
    first_beyond_kernel(const __grid_constant__ QuantizeProblem p, Scratch* scratch, float limit) {
  const std::int64_t count = p.out.N * p.out.K, step = std::int64_t{gridDim.x} * kThreads;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    if (fabsf(load_weight(p.weights, i / p.out.K, i % p.out.K)) <= limit) continue;
    atomicMin(reinterpret_cast<unsigned long long*>(&scratch->first_beyond), static_cast<unsigned long long>(i));
    return;
  }
}

__global__ void __launch_bounds__(kThreads)
    importance_kernel(const float* importance, std::int64_t columns, Scratch* scratch) {
  const std::int64_t k = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k >= columns || (importance[k] >= 0.0f && importance[k] < INFINITY)) return;
  atomicMin(&scratch->bad_importance, static_cast<std::uint32_t>(k));
}

}  // namespace heddle::cuda::any::lowbit

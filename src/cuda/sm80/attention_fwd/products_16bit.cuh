// The products of a key tile with 16-bit operands, mma.m16n8k16.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_fwd/consumer.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// 16 dimensions of q (32 in 8 bits): matrices of rows 0-7 and 8-15 of one half of them, then of the other.
template <class C>
__device__ inline void load_q_step(const Consumer<C>& rows, unsigned lane, int step,
                                   std::uint32_t (&q)[C::kGroups][4]) {
  const std::uint32_t q_at =
      ptx::shared_address(&rows.shared.q) + swizzled(C::kQkPitch, rows.warp_row + lane % 16, lane / 16);
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) ptx::load_matrix_x4(q[g], (q_at ^ step << 5) + g * kGroupRows * C::kQkPitch);
}

template <class C>
__device__ inline void keep_q(Consumer<C>& rows) {
#pragma unroll
  for (int step = 0; step < C::kKeptSteps; ++step) load_q_step(rows, rows.lane, step, rows.q[step]);
}

// S = Q K^T.
template <class C>
requires(!Float32<C> && !Int8Qk<C>) __device__ inline void multiply_qk(Consumer<C>& rows, int tile) {
  using T = typename C::Element;
  // Matrices of k: 8 dimensions of keys 0-7, the next 8, then keys 8-15. A step of 16 dimensions is two chunks further,
  // and the swizzle is an exclusive or.
  const unsigned lane = recomputed_by_tile(rows.lane, tile);
  const std::uint32_t k_at =
      ptx::shared_address(&rows.shared.k) + swizzled(C::kPitch, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
      rows.s[g][n][0] = rows.s[g][n][1] = rows.s[g][n][2] = rows.s[g][n][3] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < C::kHeadSize / 16; ++step) {
    std::uint32_t loaded[C::kGroups][4];
    const bool kept = step < C::kKeptSteps;
    auto& q = kept ? rows.q[kept ? step : 0] : loaded;
    if (!kept) load_q_step(rows, lane, step, q);
#pragma unroll
    for (int n = 0; n < C::kTileK / 16; ++n) {
      std::uint32_t k[4];
      ptx::load_matrix_x4(k, (k_at ^ step << 5) + n * 16 * C::kPitch);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        ptx::mma_16816<T>(rows.s[g][2 * n], q[g], k[0], k[1]);
        ptx::mma_16816<T>(rows.s[g][2 * n + 1], q[g], k[2], k[3]);
      }
    }
  }
}

// O += P V. The exponentials of 16 keys are computed while the tensor cores multiply those before.
template <class C>
requires(!Float32<C>) __device__ inline void multiply_pv(Consumer<C>& rows, int tile) {
  using T = typename C::Element;
  // Matrices of v: 8 columns of keys 0-7 and 8-15, then the next 8.
  const unsigned lane = recomputed_by_tile(rows.lane, tile);
  const std::uint32_t v_at = ptx::shared_address(&rows.shared.v) + swizzled(C::kPitch, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    rows.exponentials(tile, step);
    std::uint32_t probabilities[C::kGroups][4];
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &rows.s[g][2 * step + i / 2][i % 2 * 2];
        probabilities[g][i] = ptx::pack2<T>(x[0], x[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < C::kHeadSize / 16; ++n) {
      std::uint32_t v[4];
      ptx::load_matrix_x4_transposed(v, (v_at ^ n << 5) + step * 16 * C::kPitch);
      if constexpr (C::kScoreOptions) {
        // A lane's rows of v are its columns of s.
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] &= halves(rows.attended >> (4 * step + i % 2 * 2));
      }
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        ptx::mma_16816<T>(rows.o[g][2 * n], probabilities[g], v[0], v[1]);
        ptx::mma_16816<T>(rows.o[g][2 * n + 1], probabilities[g], v[2], v[3]);
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd

// S = Q K^T of 8-bit codes, mma.m16n8k32, exact in int32; O += P V is that of 16 bits.
//
// Sums start at the bits of 1.5 * 2^23 instead of 0. A sum is at most 127^2 * 128 < 2^22, so its bits are those of the
// float 1.5 * 2^23 + sum: no score is converted, and one fma inside each exponential takes the start off again, with
// the scales of row and keys.
#pragma once

#include "cuda/sm80/attention_fwd/products_16bit.cuh"

namespace heddle::cuda::sm80::attention_fwd {

template <class C>
requires Int8Qk<C> __device__ inline void multiply_qk(Consumer<C>& rows, int tile) {
  static_assert(C::kHeadSize <= 128, "sums must stay below 2^22");
  const unsigned lane = recomputed_by_tile(rows.lane, tile);
  const std::uint32_t k_at =
      ptx::shared_address(&rows.shared.k) + swizzled(C::kQkPitch, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto multiply = [](float(&s)[4], const std::uint32_t(&q)[4], std::uint32_t k0, std::uint32_t k1, bool first) {
    std::int32_t sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __float_as_int(first ? kSumStart : s[i]);
    std::int32_t out[4];
    ptx::mma_16832(out, q, k0, k1, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = __int_as_float(out[i]);
  };
#pragma unroll
  for (int step = 0; step < C::kHeadSize / 32; ++step) {
    std::uint32_t q[C::kGroups][4];
    load_q_step(rows, lane, step, q);
#pragma unroll
    for (int n = 0; n < C::kTileK / 16; ++n) {
      std::uint32_t k[4];
      ptx::load_matrix_x4(k, (k_at ^ step << 5) + n * 16 * C::kQkPitch);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        multiply(rows.s[g][2 * n], q[g], k[0], k[1], step == 0);
        multiply(rows.s[g][2 * n + 1], q[g], k[2], k[3], step == 0);
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd

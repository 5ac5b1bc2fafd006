// Products of float32 operands, mma.m16n8k8 in tf32: the exponent of float32 and 10 bits of mantissa. The tensor cores
// ignore the other 13 bits, and truncate each sum.
//
// kProducts = 1 rounds both operands. kProducts = 3 ("3xTF32": Ootomo and Yokota, arXiv 2203.03341) splits each into
// high + low, 11 significant bits each, and leaves out low * low alone. Sums of 16 terms, small products before large
// ones, are then added to the whole in float32, rounded to nearest. The bounds: docs/numerics.md.
#pragma once

#include <cstdint>

#include "cuda/common/ptx/matrix.cuh"

namespace heddle::cuda::sm80::attention {

template <int kCount>
struct Tf32 {
  std::uint32_t high[kCount], low[kCount];  // low: with three products only
};

template <int kProducts, int kCount>
__device__ inline Tf32<kCount> to_tf32(const std::uint32_t* x) {
  Tf32<kCount> out;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if constexpr (kProducts == 1) {
      // Truncation after adding 1/3 to 2/3 of the last place, as the mantissa says: an error of at most 2/3 of it, near
      // 0 in the mean; what tf32 holds stays as it is, and so do NaN and infinity. One instruction.
      out.high[n] = __float_as_uint(__uint_as_float(x[n]) * (1.0f + 0x1p-10f / 3));
    } else {
      // To nearest. NaN may become a number in high, but not in low.
      out.high[n] = (x[n] + 0x1000) & 0xffffe000;
      out.low[n] = __float_as_uint(__uint_as_float(x[n]) - __uint_as_float(out.high[n]));
    }
  }
  return out;
}

// d[g][n] += a[g] b[n] over 16 terms. a: four registers for each of two steps of 8 terms; b: two for each.
template <int kProducts, int kGroups, int kBlocks>
__device__ inline void multiply_add(float (*d)[4], int group_stride, const Tf32<8> (&a)[kGroups],
                                    const Tf32<4> (&b)[kBlocks]) {
  float sum[kGroups][kBlocks][4] = {};
  const auto each = [&](auto visit) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) visit(kProducts == 1 ? d[g * group_stride + n] : sum[g][n], a[g], b[n]);
    }
  };
  if constexpr (kProducts == 3) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      each([&](auto& x, const auto& y, const auto& z) { ptx::mma_1688(x, y.low + 4 * step, z.high + 2 * step); });
      each([&](auto& x, const auto& y, const auto& z) { ptx::mma_1688(x, y.high + 4 * step, z.low + 2 * step); });
    }
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    each([&](auto& x, const auto& y, const auto& z) { ptx::mma_1688(x, y.high + 4 * step, z.high + 2 * step); });
  }
  if constexpr (kProducts == 3) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[g * group_stride + n][i] += sum[g][n][i];
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention

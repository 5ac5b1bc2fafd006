// The products of a key tile with float32 operands, mma.m16n8k8 in tf32: the exponent of float32 and 10 bits of
// mantissa. The tensor cores ignore the other 13 bits, and truncate each sum.
//
// kProducts = 1 rounds both operands. kProducts = 3 ("3xTF32": Ootomo and Yokota, arXiv 2203.03341) splits each into
// high + low, 11 significant bits each, and leaves out low * low alone. Sums of 16 terms, small products before large
// ones, are then added to the whole in float32, rounded to nearest. The bounds: docs/numerics.md.
#pragma once

#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_fwd/consumer.cuh"

namespace heddle::cuda::sm80::attention_fwd {

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

// S = Q K^T.
template <class C>
requires Float32<C> __device__ inline void multiply_qk(Consumer<C>& rows, int tile) {
  // Matrices of 8 rows and 4 dimensions. q: rows 0-7, rows 8-15, then of the next 4 dimensions. k: 16 dimensions of 8
  // keys.
  const unsigned lane = recomputed(rows.lane, tile);
  const std::uint32_t q_at =
      ptx::shared_address(&rows.shared.q) + swizzled(C::kPitch, rows.warp_row + lane % 16, lane / 16);
  const std::uint32_t k_at = ptx::shared_address(&rows.shared.k) + swizzled(C::kPitch, lane % 8, lane / 8);
  constexpr int kBlocks = 2;  // of 8 keys that are multiplied together
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
      rows.s[g][n][0] = rows.s[g][n][1] = rows.s[g][n][2] = rows.s[g][n][3] = 0.0f;
    }
  }
  const int q_size = static_cast<int>(rows.p.problem.D);
#pragma unroll 1
  for (int d = 0; 16 * d < q_size; ++d) {
    Tf32<8> q[C::kGroups];
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      std::uint32_t words[2][4];
      ptx::load_matrix_x4(words[0], (q_at ^ d << 6) + g * kGroupRows * C::kPitch);
      ptx::load_matrix_x4(words[1], (q_at ^ d << 6 ^ 1 << 5) + g * kGroupRows * C::kPitch);
      q[g] = to_tf32<C::kProducts, 8>(words[0]);
    }
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; n += kBlocks) {
      Tf32<4> k[kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        std::uint32_t words[4];
        ptx::load_matrix_x4(words, (k_at ^ d << 6) + (n + i) * 8 * C::kPitch);
        k[i] = to_tf32<C::kProducts, 4>(words);
      }
      multiply_add<C::kProducts>(&rows.s[0][n], C::kTileK / 8, q, k);
    }
  }
}

// O += P V. The order of the keys in a product is free: that of P's registers as S left them, two keys side by side in
// a lane. The order of O's columns is free too: a lane reads four columns of V at once, one for each of four blocks,
// and block 4 j + m of o has columns 32 j + 4 n + m.
template <class C>
requires Float32<C> __device__ inline void multiply_pv(Consumer<C>& rows, int tile) {
  const unsigned lane = recomputed(rows.lane, tile);
  const std::uint32_t v_at = ptx::shared_address(&rows.shared.v) + swizzled(C::kPitch, lane % 4 * 2, lane / 4);
  const int v_size = static_cast<int>(rows.p.problem.Dv);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    rows.exponentials(tile, step);
    Tf32<8> probabilities[C::kGroups];
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      std::uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i] = __float_as_uint(rows.s[g][2 * step + i / 4][i % 2 * 2 + i % 4 / 2]);
      probabilities[g] = to_tf32<C::kProducts, 8>(words);
    }
#pragma unroll
    for (int j = 0; j < C::kHeadSize / 32; ++j) {
      if (32 * j >= v_size) break;
      std::uint32_t words[4][4];  // block, then keys 2 (lane % 4), the next, and those of the next 8 keys
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 v = ptx::load_shared_16((v_at ^ i % 2 << 4) + j * 128 + (step * 16 + i / 2 * 8 + i % 2) * C::kPitch);
        if constexpr (C::kScoreOptions) {
          if ((rows.attended >> (4 * step + i) & 1) == 0) v = {};
        }
        words[0][i] = v.x;
        words[1][i] = v.y;
        words[2][i] = v.z;
        words[3][i] = v.w;
      }
      Tf32<4> v[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) v[m] = to_tf32<C::kProducts, 4>(words[m]);
      multiply_add<C::kProducts>(&rows.o[0][4 * j], C::kHeadSize / 8, probabilities, v);
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd

// The products of a key tile with float32 operands: how precise they are, sm80/attention/tf32.cuh says.
#pragma once

#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/tf32.cuh"
#include "cuda/sm80/attention_fwd/consumer.cuh"

namespace heddle::cuda::sm80::attention_fwd {

using attention::multiply_add;
using attention::Tf32;
using attention::to_tf32;

// S = Q K^T.
template <class C>
requires Float32<C> __device__ inline void multiply_qk(Consumer<C>& rows, int tile) {
  // Matrices of 8 rows and 4 dimensions. q: rows 0-7, rows 8-15, then of the next 4 dimensions. k: 16 dimensions of 8
  // keys.
  const unsigned lane = recomputed_by_tile(rows.lane, tile);
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
  const unsigned lane = recomputed_by_tile(rows.lane, tile);
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

// The three kinds of products of tiles in shared memory with 16-bit operands, mma.m16n8k16. Addresses are those of
// tiles or of rows of theirs whose number is a multiple of 16; a step of 16 columns is two chunks further, and the
// swizzle is an exclusive or. What sums[g][n] holds: group g of 16 rows, block n of 8 columns.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/sm80/attention/scores.cuh"
#include "cuda/sm80/attention_bwd/config.h"

namespace heddle::cuda::sm80::attention_bwd {

// sums += A Bᵀ over the head size. a, b: the first row of each that this warp multiplies.
template <class C, int kGroups, int kBlocks>
requires(!Float32<C>) __device__ inline void multiply_by_transposed(float (&sums)[kGroups][kBlocks][4], std::uint32_t a,
                                                                    std::uint32_t b, unsigned lane, int) {
  using T = typename C::Element;
  const std::uint32_t a_at = a + swizzled(C::kPitch, lane % 16, lane / 16);
  const std::uint32_t b_at = b + swizzled(C::kPitch, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < C::kHeadSize / 16; ++step) {
    std::uint32_t x[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) ptx::load_matrix_x4(x[g], (a_at ^ step << 5) + g * kGroupRows * C::kPitch);
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n) {
      std::uint32_t y[4];
      ptx::load_matrix_x4(y, (b_at ^ step << 5) + n * 16 * C::kPitch);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        ptx::mma_16816<T>(sums[g][2 * n], x[g], y[0], y[1]);
        ptx::mma_16816<T>(sums[g][2 * n + 1], x[g], y[2], y[3]);
      }
    }
  }
}

// sums += Aᵀ B over the query rows of a tile. a: P or dS, from column `a_column` on; b: rows of the head size, from
// `b_column` on; both columns are multiples of 16.
template <class C, int kGroups, int kBlocks>
requires(!Float32<C>) __device__
    inline void multiply_transposed(float (&sums)[kGroups][kBlocks][4], std::uint32_t a, unsigned a_column,
                                    std::uint32_t b, unsigned b_column, unsigned lane) {
  using T = typename C::Element;
  // Matrices of a: 8 rows of columns 0-7 and 8-15, then the next 8 rows. Of b: as multiply() has them.
  const std::uint32_t a_at = a + swizzled(C::kPairPitch, lane % 8 + lane / 16 * 8, a_column / 8 + lane / 8 % 2);
  const std::uint32_t b_at = b + swizzled(C::kPitch, lane % 16, b_column / 8 + lane / 16);
#pragma unroll
  for (int step = 0; step < C::kTileQ / 16; ++step) {
    std::uint32_t x[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      ptx::load_matrix_x4_transposed(x[g], (a_at ^ g << 5) + step * 16 * C::kPairPitch);
    }
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n) {
      std::uint32_t y[4];
      ptx::load_matrix_x4_transposed(y, (b_at ^ n << 5) + step * 16 * C::kPitch);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        ptx::mma_16816<T>(sums[g][2 * n], x[g], y[0], y[1]);
        ptx::mma_16816<T>(sums[g][2 * n + 1], x[g], y[2], y[3]);
      }
    }
  }
}

template <class C, int kGroups>
requires(!Float32<C>) struct Left<C, kGroups> {
  std::uint32_t x[C::kTileK / 16][kGroups][4];

  // a: the first row.
  __device__ Left(std::uint32_t a, unsigned lane) {
    const std::uint32_t a_at = a + swizzled(C::kPairPitch, lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        ptx::load_matrix_x4(x[step][g], (a_at ^ step << 5) + g * kGroupRows * C::kPairPitch);
      }
    }
  }
};

// sums = A B over the keys of a tile. b: keys, from column `b_column` on, a multiple of what the sums have. attended:
// this lane's word of SharedMemory::attended; other keys may hold anything and are left out.
template <class C, int kGroups, int kBlocks>
requires(!Float32<C>) __device__
    inline void multiply(float (&sums)[kGroups][kBlocks][4], const Left<C, kGroups>& a, std::uint32_t b,
                         unsigned b_column, unsigned lane, std::uint32_t attended) {
  using T = typename C::Element;
  const std::uint32_t b_at = b + swizzled(C::kPitch, lane % 16, b_column / 8 + lane / 16);
  clear(sums);
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n) {
      std::uint32_t y[4];
      ptx::load_matrix_x4_transposed(y, (b_at ^ n << 5) + step * 16 * C::kPitch);
      if constexpr (C::kScoreOptions) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] &= halves(attended >> (4 * step + i % 2 * 2));
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        ptx::mma_16816<T>(sums[g][2 * n], a.x[step][g], y[0], y[1]);
        ptx::mma_16816<T>(sums[g][2 * n + 1], a.x[step][g], y[2], y[3]);
      }
    }
  }
}

// Two neighbouring pairs of P or dS, at rows and columns as the sums hold them.
template <class C>
requires(!Float32<C>) __device__
    inline void store_pair(std::byte* tile, unsigned row, unsigned column, float x, float y) {
  *reinterpret_cast<std::uint32_t*>(tile + swizzled(C::kPairPitch, row, column / 8) + column % 8 * 2) =
      ptx::pack2<typename C::Element>(x, y);
}

// 16 bytes of a row of an output, this lane's of four blocks of sums from `n` on, times `scale`: all 8 columns of block
// n + lane % 4. i: of the row's first element in a block. The four lanes of a row exchange pairs of columns. All lanes.
template <class C, int kBlocks>
requires(!Float32<C>) __device__ inline uint4
    piece_of(const float (&sums)[kBlocks][4], int n, int i, int lane, float scale) {
  const auto pair = [&](int j) {
    return ptx::pack2<typename C::Element>(sums[n + j][i] * scale, sums[n + j][i + 1] * scale);
  };
  std::uint32_t even[2], odd[2];  // of columns that an even and an odd lane had: blocks (lane % 2) and 2 + (lane % 2)
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const std::uint32_t left = pair(2 * j), right = pair(2 * j + 1);
    const bool is_odd = lane % 2 != 0;
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, is_odd ? left : right, 1);
    even[j] = is_odd ? other : left;
    odd[j] = is_odd ? right : other;
  }
  const bool high = lane % 4 >= 2;
  const std::uint32_t other_even = __shfl_xor_sync(0xffffffff, high ? even[0] : even[1], 2);
  const std::uint32_t other_odd = __shfl_xor_sync(0xffffffff, high ? odd[0] : odd[1], 2);
  return high ? uint4{other_even, other_odd, even[1], odd[1]} : uint4{even[0], odd[0], other_even, other_odd};
}

}  // namespace heddle::cuda::sm80::attention_bwd

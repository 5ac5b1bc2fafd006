// The products of products_16bit.cuh with float32 operands: how precise they are, sm80/attention/tf32.cuh says.
#pragma once

#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/tf32.cuh"
#include "cuda/sm80/attention_bwd/config.h"

namespace heddle::cuda::sm80::attention_bwd {

using attention::multiply_add;
using attention::Tf32;
using attention::to_tf32;

// size: columns that are not zeros.
template <class C, int kGroups, int kBlocks>
requires Float32<C> __device__ inline void multiply_by_transposed(float (&sums)[kGroups][kBlocks][4], std::uint32_t a,
                                                                  std::uint32_t b, unsigned lane, int size) {
  // Matrices of 8 rows and 4 dimensions. a: rows 0-7, rows 8-15, then of the next 4 dimensions; b: 16 dimensions of 8
  // rows.
  const std::uint32_t a_at = a + swizzled(C::kPitch, lane % 16, lane / 16);
  const std::uint32_t b_at = b + swizzled(C::kPitch, lane % 8, lane / 8);
  constexpr int kBatch = kBlocks < 2 ? kBlocks : 2;  // blocks that are multiplied together
#pragma unroll 1
  for (int d = 0; 16 * d < size; ++d) {
    Tf32<8> x[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t words[2][4];
      ptx::load_matrix_x4(words[0], (a_at ^ d << 6) + g * kGroupRows * C::kPitch);
      ptx::load_matrix_x4(words[1], (a_at ^ d << 6 ^ 1 << 5) + g * kGroupRows * C::kPitch);
      x[g] = to_tf32<C::kProducts, 8>(words[0]);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; n += kBatch) {
      Tf32<4> y[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        std::uint32_t words[4];
        ptx::load_matrix_x4(words, (b_at ^ d << 6) + (n + i) * 8 * C::kPitch);
        y[i] = to_tf32<C::kProducts, 4>(words);
      }
      multiply_add<C::kProducts>(&sums[0][n], kBlocks, x, y);
    }
  }
}

// 16 rows and 32 columns of B, [k][n], as four blocks. Free are the order of k in a product, here a lane's two rows
// side by side, and that of the columns: block m of each 32 has columns 4 n + m, so that a lane reads four at once.
template <class C>
__device__ inline void load_blocks(std::uint32_t at, unsigned keep, Tf32<4> (&y)[4]) {
  std::uint32_t words[4][4];  // block; then rows 2 (lane % 4), the next, and those of the next 8 rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 row = ptx::load_shared_16((at ^ i % 2 << 4) + (i / 2 * 8 + i % 2) * C::kPitch);
    if ((keep >> i & 1) == 0) row = {};
    words[0][i] = row.x;
    words[1][i] = row.y;
    words[2][i] = row.z;
    words[3][i] = row.w;
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) y[m] = to_tf32<C::kProducts, 4>(words[m]);
}

template <class C>
__device__ inline std::uint32_t blocks_address(std::uint32_t b, unsigned column, unsigned lane) {
  return b + swizzled(C::kPitch, lane % 4 * 2, column / 4 + lane / 4);
}

__device__ inline std::uint32_t shared_word(std::uint32_t from) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

template <class C, int kGroups, int kBlocks>
requires Float32<C> __device__ inline void multiply_transposed(float (&sums)[kGroups][kBlocks][4], std::uint32_t a,
                                                               unsigned a_column, std::uint32_t b, unsigned b_column,
                                                               unsigned lane) {
  const std::uint32_t b_at = blocks_address<C>(b, b_column, lane);
#pragma unroll 1
  for (int step = 0; step < C::kTileQ / 16; ++step) {
    Tf32<8> x[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned row = step * 16 + i / 4 * 8 + lane % 4 * 2 + i % 4 / 2;
        const unsigned column = a_column + kGroupRows * g + i % 2 * 8 + lane / 4;
        words[i] = shared_word(a + swizzled(C::kPairPitch, row, column / 4) + column % 4 * 4);
      }
      x[g] = to_tf32<C::kProducts, 8>(words);
    }
#pragma unroll
    for (int j = 0; j < kBlocks / 4; ++j) {
      Tf32<4> y[4];
      load_blocks<C>(b_at + j * 128 + step * 16 * C::kPitch, 0xf, y);
      multiply_add<C::kProducts>(&sums[0][4 * j], kBlocks, x, y);
    }
  }
}

template <class C, int kGroups>
requires Float32<C>
struct Left<C, kGroups> {
  std::uint32_t a;
  __device__ Left(std::uint32_t first_row, unsigned) : a(first_row) {}
};

template <class C, int kGroups, int kBlocks>
requires Float32<C> __device__ inline void multiply(float (&sums)[kGroups][kBlocks][4], const Left<C, kGroups>& left,
                                                    std::uint32_t b, unsigned b_column, unsigned lane,
                                                    std::uint32_t attended) {
  const std::uint32_t a = left.a;
  clear(sums);
  const std::uint32_t b_at = blocks_address<C>(b, b_column, lane);
#pragma unroll 1
  for (int step = 0; step < C::kTileK / 16; ++step) {
    Tf32<8> x[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      std::uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned row = kGroupRows * g + i % 2 * 8 + lane / 4;
        const unsigned column = step * 16 + i / 4 * 8 + lane % 4 * 2 + i % 4 / 2;
        words[i] = shared_word(a + swizzled(C::kPairPitch, row, column / 4) + column % 4 * 4);
      }
      x[g] = to_tf32<C::kProducts, 8>(words);
    }
#pragma unroll
    for (int j = 0; j < kBlocks / 4; ++j) {
      Tf32<4> y[4];
      load_blocks<C>(b_at + j * 128 + step * 16 * C::kPitch, attended >> 4 * step, y);
      multiply_add<C::kProducts>(&sums[0][4 * j], kBlocks, x, y);
    }
  }
}

template <class C>
requires Float32<C> __device__ inline void store_pair(std::byte* tile, unsigned row, unsigned column, float x,
                                                      float y) {
  *reinterpret_cast<float2*>(tile + swizzled(C::kPairPitch, row, column / 4) + column % 4 * 4) = {x, y};
}

}  // namespace heddle::cuda::sm80::attention_bwd

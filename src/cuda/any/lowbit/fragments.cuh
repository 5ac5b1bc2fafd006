// Weights in fragment order as floats: a block of 128 threads takes a block of 64 rows and 128 columns, each thread the
// words that are its own in a product.
#pragma once

#include <cstdint>

#include "cuda/any/lowbit/elements.cuh"
#include "cuda/any/lowbit/pieces.cuh"
#include "cuda/linear.h"
#include "lowbit/fragments.h"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::FragmentBlock;
using heddle::lowbit::FragmentBlock8;
using heddle::lowbit::Weights;

constexpr int kFragmentThreads = 128;

// The codes of a thread's 8 weights of step `step`, or 16 of order fragments8, two neighbouring columns at a time:
// visit(row, column, code, next code) in the block.
template <class Visit>
__device__ inline void for_each_pair(const FragmentBlock& block, int step, Visit visit) {
  const int t = static_cast<int>(threadIdx.x), row = 16 * (t / 32) + t % 32 / 4, column = 16 * step + 2 * (t % 4);
  const std::uint32_t low = block.codes[step / 4][t][step % 4], high = low >> 16;
  const auto first = [](std::uint32_t h) { return (h >> 15 & 1u) << 3 | (h >> 6 & 7u); };
  const auto second = [](std::uint32_t h) { return (h >> 12 & 1u) << 3 | (h >> 3 & 7u); };
  const auto third = [](std::uint32_t h) { return (h >> 13 & 1u) << 3 | (h & 7u); };
  const auto fourth = [](std::uint32_t h) { return (h >> 14 & 1u) << 3 | (h >> 9 & 7u); };
  visit(row, column, first(low), first(high));
  visit(row + 8, column, second(low), second(high));
  visit(row, column + 8, third(low), third(high));
  visit(row + 8, column + 8, fourth(low), fourth(high));
}
template <class Visit>
__device__ inline void for_each_pair(const FragmentBlock8& block, int step, Visit visit) {
  const int t = static_cast<int>(threadIdx.x), row = 16 * (t / 32) + t % 32 / 4, column = 32 * step + 4 * (t % 4);
  const auto first = [](std::uint32_t word, int i) { return (word >> 4 * i & 7u) | (word >> (8 * i + 7) & 1u) << 3; };
  const auto second = [](std::uint32_t word, int i) {
    return (word >> (16 + 4 * i) & 7u) | (word >> (8 * i + 3) & 1u) << 3;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::uint32_t word = block.codes[step / 2][t][step % 2 * 2 + r];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      visit(row + 8 * r, column + i, first(word, i), first(word, i + 1));
      visit(row + 8 * r, column + 16 + i, second(word, i), second(word, i + 1));
    }
  }
}

// Of a row's columns that share a scale; code 0 may stand beside a scale that was not kept.
__device__ inline float scale_at(const FragmentBlock& block, int row, int column) {
  const unsigned stored = block.scales[row][column / FragmentBlock::kGroup];
  // (1 + m / 8) 2^(e - 15), over the factor
  return __uint_as_float((stored << 20) + ((127u - 15u) << 23)) * (1.0f / FragmentBlock::kScaleFactor);
}
__device__ inline float scale_at(const FragmentBlock8& block, int row, int column) {
  return __uint_as_float((block.exponents[row][column / FragmentBlock8::kGroup] + 127u) << 23);
}

// wanted: of W, columns from a whole block on. CTA b has block b % wanted_blocks of the columns, of a block of rows.
// The tile is turned in shared memory, so that rows are written eight columns at a time.
template <class Block>
__global__ void __launch_bounds__(kFragmentThreads)
    decode_fragments_kernel(const Block* blocks, const float* row_scales, std::int64_t column_blocks, bool gated,
                            const __grid_constant__ WeightBlock wanted, int wanted_blocks,
                            const __grid_constant__ Weights to, bool wide) {
  constexpr int kRows = heddle::lowbit::kBlockRows, kColumns = heddle::lowbit::kBlockColumns, kEight = 8;
  __shared__ alignas(16) float tile[kRows][kColumns + 4];
  const std::int64_t row_block = blockIdx.x / static_cast<unsigned>(wanted_blocks);
  const std::int64_t first_column = std::int64_t{blockIdx.x % static_cast<unsigned>(wanted_blocks)} * kColumns;
  const Block& block = blocks[row_block * column_blocks + (wanted.column + first_column) / kColumns];
  const float* const scales = row_scales + row_block * kRows;
#pragma unroll 1
  for (int step = 0; step < Block::kSteps; ++step) {
    for_each_pair(block, step, [&](int row, int column, unsigned code, unsigned next) {
      const float scale = scale_at(block, row, column), row_scale = scales[row];
      *reinterpret_cast<float2*>(&tile[row][column]) =
          make_float2(e2m1_value(code) * scale * row_scale, e2m1_value(next) * scale * row_scale);
    });
  }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / kEight; i += kFragmentThreads) {
    const int row = i / (kColumns / kEight), column = i % (kColumns / kEight) * kEight;
    const std::int64_t n = heddle::lowbit::row_at(row_block * kRows + row, gated) - wanted.row;
    const std::int64_t k = first_column + column, left = wanted.columns - k;
    if (n < 0 || n >= wanted.rows || left <= 0) continue;
    float w[kEight];
    const auto* const from = reinterpret_cast<const float4*>(&tile[row][column]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 four = from[j];
      w[4 * j] = four.x, w[4 * j + 1] = four.y, w[4 * j + 2] = four.z, w[4 * j + 3] = four.w;
    }
    store_eight(to, wide, n, k, static_cast<int>(min(left, std::int64_t{kEight})), w);
  }
}

}  // namespace heddle::cuda::any::lowbit

// Weights in fragment order as floats: a block of 128 threads takes a block of 64 rows and 128 columns (64 of 8-bit
// codes), each thread the words that are its own in a product. What a type here is called with is a block's bytes.
#pragma once

#include <cstdint>

#include "cuda/any/lowbit/elements.cuh"
#include "cuda/any/lowbit/pieces.cuh"
#include "cuda/linear.h"
#include "lowbit/fragments.h"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::FragmentBlock;
using heddle::lowbit::FragmentBlock8;
using heddle::lowbit::FragmentCodes;
using heddle::lowbit::ScaledBlock8;
using heddle::lowbit::Weights;

constexpr int kFragmentThreads = 128;

// The first of the rows, 8 apart, of which this thread has weights.
__device__ inline int fragment_row() {
  const int t = static_cast<int>(threadIdx.x);
  return 16 * (t / 32) + t % 32 / 4;
}

// for_each_pair(block, step, row_scales, table, visit) calls visit(row, column, weight, next column's) for a thread's 8
// weights of step `step`, or 16 of order fragments8.
struct E2M1Fragments {
  static constexpr int kColumns = heddle::lowbit::kBlockColumns, kSteps = FragmentBlock::kSteps;
  static constexpr Element kElement = Element::e2m1;

  template <class Visit>
  __device__ void for_each_pair(const std::byte* at, int step, const float* row_scales, const float*,
                                Visit visit) const {
    const auto& block = *reinterpret_cast<const FragmentBlock*>(at);
    const int t = static_cast<int>(threadIdx.x), row = fragment_row(), column = 16 * step + 2 * (t % 4);
    const std::uint32_t word = block.codes[step / 4][t][step % 4];
    // Of one of the first three registers; of the last.
    const auto rotated = [&](int i, int half) {
      const std::uint32_t x = __funnelshift_r(word, word, 16 * half + 3 * i);
      return (x >> 15 & 1u) << 3 | (x >> 6 & 7u);
    };
    const auto last = [&](int half) {
      const std::uint32_t x = word >> 16 * half;
      return (x >> 1 & 1u) << 3 | (x & 1u) << 2 | (x >> 3 & 3u);
    };
    const float upper = scale(block, row, step), lower = scale(block, row + 8, step);
    const auto pair = [&](int r, int c, float of_group, unsigned code, unsigned next) {
      visit(r, c, e2m1_value(code) * of_group * row_scales[r], e2m1_value(next) * of_group * row_scales[r]);
    };
    pair(row, column, upper, rotated(0, 0), rotated(0, 1));
    pair(row + 8, column, lower, rotated(1, 0), rotated(1, 1));
    pair(row, column + 8, upper, rotated(2, 0), rotated(2, 1));
    pair(row + 8, column + 8, lower, last(0), last(1));
  }
  // (1 + m / 8) 2^(e - 15), over the factor; code 0 may stand beside a scale that was not kept.
  static __device__ float scale(const FragmentBlock& block, int row, int step) {
    const unsigned stored = block.scales[row][step];
    return __uint_as_float((stored << 20) + ((127u - 15u) << 23)) * (1.0f / FragmentBlock::kScaleFactor);
  }
};

// Magnitude and sign of weight i of a word of order fragments8.
__device__ inline unsigned code8(std::uint32_t word, int i) {
  return (word >> 4 * i & 7u) | (word >> (i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3) & 1u) << 3;
}

struct Fragments8 {
  static constexpr int kColumns = heddle::lowbit::kBlockColumns, kSteps = FragmentBlock8::kSteps;
  static constexpr Element kElement = Element::e2m1;

  template <class Visit>
  __device__ void for_each_pair(const std::byte* at, int step, const float* row_scales, const float*,
                                Visit visit) const {
    const auto& block = *reinterpret_cast<const FragmentBlock8*>(at);
    const int t = static_cast<int>(threadIdx.x), column = 32 * step + 4 * (t % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = fragment_row() + 8 * r;
      const std::uint32_t word = block.codes[step / 2][t][step % 2 * 2 + r];
      const float scale = __uint_as_float((block.exponents[row][step] + 127u) << 23) * row_scales[row];
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        visit(row, column + i % 4 + i / 4 * 16, e2m1_value(code8(word, i)) * scale,
              e2m1_value(code8(word, i + 1)) * scale);
      }
    }
  }
};

struct ScaledFragments8 {
  static constexpr int kColumns = heddle::lowbit::kBlockColumns, kSteps = ScaledBlock8::kSteps;
  static constexpr Element kElement = Element::e2m1;

  template <class Visit>
  __device__ void for_each_pair(const std::byte* at, int step, const float* row_scales, const float*,
                                Visit visit) const {
    const auto& block = *reinterpret_cast<const ScaledBlock8*>(at);
    const int t = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = fragment_row() + 8 * r;
      const std::uint32_t word = block.codes[step / 2][t][step % 2 * 2 + r];
      const unsigned bits = block.scales[row][step / 2][t % 4 / 2][step % 2] & 0x7fu;
      const float scale = __uint_as_float((bits << 20) + ((127u - 7u) << 23));  // a normal number
      const auto weight = [&](int i) {
        unsigned code = code8(word, i);
        if ((code & 7u) == 5u || (code & 7u) == 6u) code ^= 3u;
        return rounded_to_e4m3(e2m1_value(code) * scale) * row_scales[row];
      };
#pragma unroll
      for (int i = 0; i < 8; i += 2) visit(row, 32 * step + 8 * (t % 4) + i, weight(i), weight(i + 1));
    }
  }
  // Of 0 or a normal number, not beyond the largest: to 3 bits behind the point, ties to even.
  static __device__ float rounded_to_e4m3(float x) {
    const std::uint32_t bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
  }
};

// FragmentCodes, and behind them what block_layout() says.
template <Element kElement_>
struct CodeFragments {
  static constexpr Element kElement = kElement_;
  static constexpr bool kWide = heddle::lowbit::bits_of(kElement) == 8;
  static constexpr int kColumns = kWide ? 64 : heddle::lowbit::kBlockColumns, kSteps = kColumns / 16;

  int groups, scales, zeros;  // of BlockLayout

  template <class Visit>
  __device__ void for_each_pair(const std::byte* block, int step, const float* row_scales, const float* table,
                                Visit visit) const {
    const auto& codes = *reinterpret_cast<const FragmentCodes*>(block);
    const int t = static_cast<int>(threadIdx.x), column = 16 * step + 2 * (t % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = fragment_row() + i % 2 * 8;
      const std::uint32_t word =
          kWide ? codes.words[step / 2][t][step % 2 * 2 + i / 2] : codes.words[step / 4][t][step % 4];
      const int low = kWide ? i % 2 * 16 : kElement == Element::int4 ? 4 * i : 8 * i;
      const int high = low + (kWide ? 8 : kElement == Element::int4 ? 16 : 4);
      float scale = row_scales[row], zero = heddle::lowbit::kInt4Zero;
      if constexpr (!kWide) {  // one group in 16 columns; rows have no scales of their own but fp4's factor
        const int at = step * 16 * groups / kColumns * heddle::lowbit::kBlockRows + row;
        if constexpr (kElement == Element::int4) {
          scale = __half2float(reinterpret_cast<const __half*>(block + scales)[at]);
          if (zeros != 0) zero = static_cast<float>(static_cast<std::uint8_t>(block[zeros + at]));
        } else {
          scale = reinterpret_cast<const float*>(block + scales)[at];
        }
      }
      const Coder<kElement> coder(scale, zero, table);
      const auto weight = [&](int bit) {
        const unsigned code = word >> bit & (kWide ? 255u : 15u);
        return __fmul_rn(coder.value(kElement == Element::int8 ? code ^ 0x80u : code), scale);
      };
      visit(row, column + i / 2 * 8, weight(low), weight(high));
    }
  }
};

// wanted: of W, columns from a whole block on. CTA b has block b % wanted_blocks of the columns, of block
// b / wanted_blocks of the rows from the first one on that has some.
// The tile is turned in shared memory, so that rows are written eight columns at a time.
struct FragmentData {
  const std::byte* blocks;
  const float* row_scales;
  std::int64_t column_blocks;
  int block_bytes;
  bool gated;
};
template <class Fragments>
__global__ void __launch_bounds__(kFragmentThreads)
    decode_fragments_kernel(const __grid_constant__ FragmentData data, const __grid_constant__ Fragments fragments,
                            const __grid_constant__ WeightBlock wanted, int wanted_blocks,
                            const __grid_constant__ Weights to, bool wide) {
  constexpr int kRows = heddle::lowbit::kBlockRows, kColumns = Fragments::kColumns, kEight = 8;
  __shared__ alignas(16) float tile[kRows][kColumns + 4];
  __shared__ float table[16];
  fill_table<Fragments::kElement>(table);
  const std::int64_t row_block = wanted.row / kRows + blockIdx.x / static_cast<unsigned>(wanted_blocks);
  const std::int64_t first_column = std::int64_t{blockIdx.x % static_cast<unsigned>(wanted_blocks)} * kColumns;
  const std::int64_t number = row_block * data.column_blocks + (wanted.column + first_column) / kColumns;
  const std::byte* const block = data.blocks + number * data.block_bytes;
  const float* const scales = data.row_scales + row_block * kRows;
#pragma unroll 1
  for (int step = 0; step < Fragments::kSteps; ++step) {
    fragments.for_each_pair(block, step, scales, table, [&](int row, int column, float weight, float next) {
      *reinterpret_cast<float2*>(&tile[row][column]) = make_float2(weight, next);
    });
  }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / kEight; i += kFragmentThreads) {
    const int row = i / (kColumns / kEight), column = i % (kColumns / kEight) * kEight;
    const std::int64_t n = heddle::lowbit::row_at(row_block * kRows + row, data.gated) - wanted.row;
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

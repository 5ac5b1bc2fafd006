// Weights in fragment order, read back as the tensor cores' kernels read them, bit trick by bit trick, against the
// plain dequantisation.
#include "lowbit/fragments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "heddle/error.h"
#include "kit/linear_layer.h"
#include "lowbit/formats.h"
#include "lowbit/packing_error.h"

namespace heddle::lowbit {
namespace {

// A matrix in plain storage, of random codes and scales.
struct Random {
  Matrix m;
  std::vector<std::uint8_t> codes;
  std::vector<std::byte> scales;
  float global = 0.0123f;

  Random(const char* format, std::int64_t rows, std::int64_t columns, int binades, unsigned seed) {
    std::mt19937 generator(seed);
    m.format = format_named(format);
    m.N = rows, m.K = columns;
    m.group = m.format.group != 0 ? m.format.group : columns;
    m.groups = columns / m.group;
    m.row_bytes = (columns + 1) / 2;
    codes.resize(static_cast<std::size_t>(rows * m.row_bytes));
    for (auto& x : codes) x = static_cast<std::uint8_t>(generator());
    scales.resize(static_cast<std::size_t>(rows * m.groups) * 4);
    for (std::int64_t i = 0; i < rows * m.groups; ++i) {
      if (m.format.scale == ScaleType::f32) {
        reinterpret_cast<float*>(scales.data())[i] = std::ldexp(1.0f + 0.37f * static_cast<float>(i % 3), -6);
      } else if (m.format.scale == ScaleType::e4m3) {
        reinterpret_cast<std::uint8_t*>(scales.data())[i] = static_cast<std::uint8_t>(i % 127);  // all of them
      } else {
        reinterpret_cast<std::uint8_t*>(scales.data())[i] = static_cast<std::uint8_t>(100 + generator() % binades);
      }
    }
    m.codes = codes.data();
    m.scales = scales.data();
    m.global_scale = m.format.global_scale ? &global : nullptr;
  }

  double weight(std::int64_t n, std::int64_t k) const {
    const NibblePair pair{codes[static_cast<std::size_t>(n * m.row_bytes + k / 2)]};
    const std::uint8_t code = (k % 2 == 0) == m.format.high_nibble_first ? pair.high() : pair.low();
    const double scale = load_scale(m.scales, m.format.scale, n * m.groups + k / m.group);
    return E2M1{code}.value() * scale * (m.global_scale != nullptr ? global : 1.0f);
  }
};

float bf16(std::uint32_t bits) { return bf16_to_f32(static_cast<std::uint16_t>(bits)); }

// By the kernels' arithmetic, in which nothing may carry.
std::uint32_t register_3(std::uint32_t q) { return (q & 0x001B001B) * 0x4108u; }

// What register `i` of a 16-bit product's operand has in half `half`, times the row's scale: as bfloat16, with the
// exponents of both factors moved so that they are normal numbers but for 0.5.
double operand(const FragmentBlock& block, int thread, int step, int i, int half) {
  const std::uint32_t q = block.codes[step / 4][thread][step % 4];
  constexpr std::uint32_t kBits = 0x81C081C0;
  const std::uint32_t x[4] = {q & kBits, std::rotr(q, 3) & kBits, std::rotr(q, 6) & kBits, register_3(q) & kBits};
  const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
  const std::uint32_t scale = block.scales[row][step] * 16u + ((110 + 127 - 15) << 7);
  const float product = bf16(x[i] >> 16 * half & 0xFFFF) * bf16(scale);
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(product)), product) << "not exact in bfloat16";
  return std::ldexp(static_cast<double>(product), 16) / FragmentBlock::kScaleFactor;
}

// The same for float16, whose magnitudes and scales have other places.
double operand_f16(const FragmentBlock& block, int thread, int step, int i, int half) {
  const std::uint32_t q = block.codes[step / 4][thread][step % 4];
  constexpr std::uint32_t kSign = 0x80008000, kMagnitude = 0x0E000E00;
  const std::uint32_t by_3 = std::rotr(q, 3), by_6 = std::rotr(q, 6), last = register_3(q);
  const std::uint32_t x[4] = {(q & kSign) | (q << 3 & kMagnitude), (by_3 & kSign) | (q & kMagnitude),
                              (by_6 & kSign) | (by_3 & kMagnitude), (last & kSign) | (last << 3 & kMagnitude)};
  const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
  const float product = f16_to_f32(static_cast<std::uint16_t>(x[i] >> 16 * half)) *
                        f16_to_f32(static_cast<std::uint16_t>(block.scales[row][step] << 7));
  EXPECT_EQ(f16_to_f32(f32_to_f16(product)), product) << "not exact in float16";
  return std::ldexp(static_cast<double>(product), 14) / FragmentBlock::kScaleFactor;
}

// Byte `byte` of register `i` of an e4m3 product's operand, times the row's scale.
double operand8(const FragmentBlock8& block, int thread, int step, int i, int byte) {
  const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
  const std::uint32_t q = block.codes[step / 2][thread][step % 2 * 2 + i % 2], exponent = block.exponents[row][step];
  const std::uint32_t tables[2] = {exponent * 0x08080800 + 0x14100800, exponent * 0x08080808 + 0x24201C18};
  const std::uint32_t which = (q & 0x77777777) >> (i < 2 ? 0 : 16) >> 4 * byte & 7;
  const std::uint32_t magnitude = tables[which / 4] >> 8 * (which % 4) & 0xFF;
  const std::uint32_t signs = (i < 2 ? q : q << 4) & 0x80808080;
  return 32.0 * f8e4m3_to_f32(static_cast<std::uint8_t>(magnitude | (signs >> 8 * byte & 0x80)));
}

// The same of nvfp4, by the kernel's arithmetic: magnitudes of a group by two multiplications, in which nothing may
// carry from byte to byte.
double operand8(const ScaledBlock8& block, int thread, int step, int i, int byte) {
  const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
  const std::uint32_t q = block.codes[step / 2][thread][step % 2 * 2 + i % 2];
  const std::uint8_t stored = block.scales[row][step / 2][thread % 4 / 2][step % 2];
  const std::uint32_t scale = stored + ((stored & 0x80) != 0 ? 0xFFFF0000u : 0u);
  const std::uint32_t tables[2] = {scale * 0x01010100 + 0x04FFF800, scale * 0x01010101 + 0x150D1008};
  const std::uint32_t which = (q & 0x77777777) >> (i < 2 ? 0 : 16) >> 4 * byte & 7;
  const std::uint32_t magnitude = tables[which / 4] >> 8 * (which % 4) & 0x7F;
  const std::uint32_t signs = (i < 2 ? q : q << 4) & 0x80808080;
  return f8e4m3_to_f32(static_cast<std::uint8_t>(magnitude | (signs >> 8 * byte & 0x80)));
}

struct Shape {
  const char* format;
  std::int64_t rows, columns;
  int binades;
};

class Fragments : public ::testing::TestWithParam<Shape> {};

TEST_P(Fragments, SixteenBitOperandsAreTheWeights) {
  const Shape s = GetParam();
  const Random random(s.format, s.rows, s.columns, s.binades, 1);
  const std::int64_t down = blocks_of_rows(s.rows), across = blocks_of_columns(s.columns);
  for (const bool gated : {false, true}) {
    std::vector<FragmentBlock> blocks(static_cast<std::size_t>(down * across));
    std::vector<float> row_scales(static_cast<std::size_t>(down * kBlockRows), -1.0f);
    pack(random.m, gated, blocks.data(), row_scales.data(), default_executor());
    for (std::int64_t place = 0; place < down * kBlockRows; ++place) {
      const std::int64_t row = row_at(place, gated);
      const int of_warp = static_cast<int>(place % 16), warp = static_cast<int>(place % kBlockRows / 16);
      for (std::int64_t k = 0; k < across * kBlockColumns; ++k) {
        const int of_step = static_cast<int>(k % 16), step = static_cast<int>(k % kBlockColumns / 16);
        const int thread = warp * 32 + of_warp % 8 * 4 + of_step % 8 / 2, i = of_step / 8 * 2 + of_warp / 8;
        const FragmentBlock& block = blocks[static_cast<std::size_t>(place / kBlockRows * across + k / kBlockColumns)];
        const double expected = row < s.rows && k < s.columns ? random.weight(row, k) : 0.0;
        const double scale = row_scales[static_cast<std::size_t>(place)];
        ASSERT_NEAR(operand(block, thread, step, i, of_step % 2) * scale, expected, 1e-7 * std::abs(expected))
            << place << ", " << k;
        // float16 has fewer exponents: what is 2^-22 of a row's largest scale may be rounded.
        if (s.binades <= 20) {
          ASSERT_NEAR(operand_f16(block, thread, step, i, of_step % 2) * scale, expected, 1e-7 * std::abs(expected))
              << place << ", " << k;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Fragments,
                         ::testing::Values(Shape{"nvfp4", 64, 128, 1}, Shape{"nvfp4", 150, 336, 1},
                                           Shape{"mxfp4", 64, 128, 12}, Shape{"mxfp4", 100, 288, 29},
                                           Shape{"e2m1_row", 64, 128, 1}, Shape{"e2m1_row", 70, 131, 1}));

TEST(Fragments, EightBitOperandsAreTheWeights) {
  for (const Shape& s : {Shape{"mxfp4", 64, 128, 12}, Shape{"mxfp4", 100, 288, 12}, Shape{"e2m1_row", 70, 131, 1}}) {
    const Random random(s.format, s.rows, s.columns, s.binades, 2);
    const std::int64_t down = blocks_of_rows(s.rows), across = blocks_of_columns(s.columns);
    for (const bool gated : {false, true}) {
      std::vector<FragmentBlock8> blocks(static_cast<std::size_t>(down * across));
      std::vector<float> row_scales(static_cast<std::size_t>(down * kBlockRows), -1.0f);
      pack(random.m, gated, blocks.data(), row_scales.data(), default_executor());
      for (std::int64_t place = 0; place < down * kBlockRows; ++place) {
        const std::int64_t row = row_at(place, gated);
        const int of_warp = static_cast<int>(place % 16), warp = static_cast<int>(place % kBlockRows / 16);
        for (std::int64_t k = 0; k < across * kBlockColumns; ++k) {
          const int of_step = static_cast<int>(k % 32), step = static_cast<int>(k % kBlockColumns / 32);
          const int thread = warp * 32 + of_warp % 8 * 4 + of_step % 16 / 4, i = of_step / 16 * 2 + of_warp / 8;
          const FragmentBlock8& block =
              blocks[static_cast<std::size_t>(place / kBlockRows * across + k / kBlockColumns)];
          const double expected = row < s.rows && k < s.columns ? random.weight(row, k) : 0.0;
          ASSERT_NEAR(operand8(block, thread, step, i, of_step % 4) * row_scales[static_cast<std::size_t>(place)],
                      expected, 1e-7 * std::abs(expected))
              << s.format << ": " << place << ", " << k;
        }
      }
    }
  }
}

// Scales of all bits, with every code: what the kernel's arithmetic gives, what value8() gives, and the definition,
// scale times code as the nearest E4M3, are one.
TEST(Fragments, EightBitOperandsOfNvfp4AreRoundedWeights) {
  for (const bool gated : {false, true}) {
    constexpr std::int64_t kRows = 134, kColumns = 16 * 21;
    Random random("nvfp4", kRows, kColumns, 1, 4);
    auto* const scales = reinterpret_cast<std::uint8_t*>(random.scales.data());
    // Of each row 21 scales in 10 binades: in the first rows some are subnormal, in the last ones the largest.
    for (std::int64_t n = 0; n < kRows; ++n) {
      for (std::int64_t g = 0; g < 21; ++g) {
        scales[n * 21 + g] = static_cast<std::uint8_t>(n / 2 + g * 3);
      }
    }
    for (std::size_t i = 0; i < random.codes.size(); ++i) random.codes[i] = static_cast<std::uint8_t>(i * 0x21 + i / 8);
    const FragmentLayout layout = fragment_layout(random.m.format, WeightOrder::fragments8, kRows, kColumns);
    std::vector<std::uint64_t> memory(static_cast<std::size_t>(layout.bytes) / 8 + 1);
    auto* const data = reinterpret_cast<std::byte*>(memory.data());
    auto* const row_scales = reinterpret_cast<float*>(data);
    auto* const blocks = reinterpret_cast<ScaledBlock8*>(data + layout.blocks);
    pack(random.m, gated, blocks, row_scales, default_executor());
    double largest_error = 0;
    for (std::int64_t place = 0; place < layout.row_blocks * kBlockRows; ++place) {
      const std::int64_t row = row_at(place, gated);
      EXPECT_EQ(place_of(row, gated), place);
      const std::int64_t r = place % kBlockRows, warp = r / 16, of_warp = r % 16;
      for (std::int64_t k = 0; k < layout.column_blocks * kBlockColumns; ++k) {
        const int of_step = static_cast<int>(k % 32), step = static_cast<int>(k % kBlockColumns / 32);
        const int thread = static_cast<int>(warp * 32 + of_warp % 8 * 4 + of_step / 8);
        const int i = static_cast<int>(of_step % 8 / 4 * 2 + of_warp / 8);
        const ScaledBlock8& block = blocks[place / kBlockRows * layout.column_blocks + k / kBlockColumns];
        const double found = operand8(block, thread, step, i, of_step % 4);
        if (row >= kRows || k >= kColumns) {
          ASSERT_EQ(found, 0.0) << place << ", " << k;
          continue;
        }
        const double weight = random.weight(row, k), scale = row_scales[place];
        ASSERT_EQ(static_cast<float>(found * scale), value8(random.m.format, data, layout, gated, row, k))
            << row << ", " << k;
        const double quotient = weight / scale;  // of few bits: exact but for the global scale's rounding
        ASSERT_EQ(found, E4M3::nearest(static_cast<float>(quotient)).value()) << row << ", " << k;
        if (weight == 0) continue;
        largest_error = std::max(largest_error, std::abs(found * scale / weight - 1));
      }
    }
    EXPECT_LE(largest_error, 1.0 / 21 + 1e-6);  // 2.5 for 2.625
    EXPECT_GT(largest_error, 1.0 / 22);
  }
}

// Of a row whose scales are further apart: what is below 2^-10 of the largest is rounded to the codes of one scale.
TEST(Fragments, SmallScalesOfNvfp4AreRoundedAsStated) {
  Random random("nvfp4", 1, 128, 1, 5);
  auto* const scales = reinterpret_cast<std::uint8_t*>(random.scales.data());
  // 448 is taken to 1.75 * 2^5 by 2^3: bits 102, and the least scale is 2^-5 * 2^3. 0, and 2^-2, -3, -4, -6 and -9.
  const std::uint8_t stored[8] = {126, 0, 40, 32, 24, 8, 1, 126};
  std::memcpy(scales, stored, sizeof stored);
  for (auto& x : random.codes) x = 0x7D;  // -3 and 6, with signs 1 and 0
  std::vector<std::byte> data(
      static_cast<std::size_t>(fragment_layout(random.m.format, WeightOrder::fragments8, 1, 128).bytes));
  const FragmentLayout layout = fragment_layout(random.m.format, WeightOrder::fragments8, 1, 128);
  pack(random.m, false, reinterpret_cast<ScaledBlock8*>(data.data() + layout.blocks),
       reinterpret_cast<float*>(data.data()), default_executor());
  const auto weight = [&](int k) { return value8(random.m.format, data.data(), layout, false, 0, k) / random.global; };
  EXPECT_FLOAT_EQ(weight(1), 2560.0f);  // of 2688, E4M3 has 320 and 352 times 8
  EXPECT_EQ(weight(17), 0.0f);
  EXPECT_FLOAT_EQ(weight(33), 1.5f);    // 6 * 2^-2
  EXPECT_FLOAT_EQ(weight(32), -0.75f);  // -3
  EXPECT_FLOAT_EQ(weight(49), 0.75f);   // 6 * 2^-3 is 3 of the least scale
  EXPECT_FLOAT_EQ(weight(65), 0.375f);
  EXPECT_FLOAT_EQ(weight(64), -0.25f);  // -3 * 2^-4 is 0.75 of the least: a tie, to the even code
  EXPECT_FLOAT_EQ(weight(81), 0.125f);  // 6 * 2^-6 is 0.375 of the least
  EXPECT_EQ(weight(97), 0.0f);
}

// Scales too far below a row's largest: 0 for 16-bit products, multiples of half the row's scale for e4m3.
TEST(Fragments, SmallScalesAreRoundedAsStated) {
  Random random("mxfp4", 1, 128, 1, 3);
  auto* const scales = reinterpret_cast<std::uint8_t*>(random.scales.data());
  const std::uint8_t stored[4] = {140, 140 - 29, 140 - 30, 140 - 13};
  std::memcpy(scales, stored, sizeof stored);
  for (auto& x : random.codes) x = 0x77;  // 6
  std::vector<FragmentBlock> blocks(1);
  std::vector<FragmentBlock8> blocks8(1);
  std::vector<float> row_scales(kBlockRows), row_scales8(kBlockRows);
  pack(random.m, false, blocks.data(), row_scales.data(), default_executor());
  pack(random.m, false, blocks8.data(), row_scales8.data(), default_executor());
  const auto weight = [&](int k) { return operand(blocks[0], k % 8 / 2, k / 16, k % 16 / 8 * 2, 0) * row_scales[0]; };
  const auto weight8 = [&](int k) {
    return operand8(blocks8[0], k % 16 / 4, k / 32, k % 32 / 16 * 2, 0) * row_scales8[0];
  };
  EXPECT_EQ(weight(0), std::ldexp(6.0, 13));
  EXPECT_EQ(weight(32), std::ldexp(6.0, 13 - 29));
  EXPECT_EQ(weight(64), 0.0);
  EXPECT_EQ(weight(96), std::ldexp(6.0, 0));
  EXPECT_EQ(weight8(0), std::ldexp(6.0, 13));
  EXPECT_EQ(weight8(32), 0.0);
  EXPECT_EQ(weight8(96), std::ldexp(1.5, 2));  // 6 * 2^-13 of the largest: 1.5 of the least scale, 2^-11
}

TEST(Fragments, WhatSixteenBitOperandsLoseIsCounted) {
  const Random random("mxfp4", 100, 288, 45, 6);
  const std::int64_t down = blocks_of_rows(100), across = blocks_of_columns(288);
  const PackingError error = packing_error(random.m, WeightOrder::fragments16, default_executor());
  for (const bool gated : {false, true}) {
    std::vector<FragmentBlock> blocks(static_cast<std::size_t>(down * across));
    std::vector<float> row_scales(static_cast<std::size_t>(down * kBlockRows));
    pack(random.m, gated, blocks.data(), row_scales.data(), default_executor());
    std::int64_t changed = 0, first = 100 * 288;
    for (std::int64_t row = 0; row < 100; ++row) {
      const std::int64_t place = place_of(row, gated);
      const int of_warp = static_cast<int>(place % 16), warp = static_cast<int>(place % kBlockRows / 16);
      for (std::int64_t k = 0; k < 288; ++k) {
        const int of_step = static_cast<int>(k % 16), step = static_cast<int>(k % kBlockColumns / 16);
        const int thread = warp * 32 + of_warp % 8 * 4 + of_step % 8 / 2, i = of_step / 8 * 2 + of_warp / 8;
        const FragmentBlock& block = blocks[static_cast<std::size_t>(place / kBlockRows * across + k / kBlockColumns)];
        const double found = operand(block, thread, step, i, of_step % 2) * row_scales[static_cast<std::size_t>(place)];
        if (found == random.weight(row, k)) continue;
        EXPECT_EQ(found, 0.0);
        ++changed;
        first = std::min(first, row * 288 + k);
      }
    }
    EXPECT_GT(changed, 0);
    EXPECT_EQ(error.changed, changed);
    EXPECT_EQ(error.max, 1.0);
    EXPECT_EQ(error.max_row * 288 + error.max_column, first);
  }
}

// Their blocks would hold something else.
TEST(Fragments, NegativeScalesOfNvfp4AreRefused) {
  for (const WeightOrder order : {WeightOrder::fragments16, WeightOrder::fragments8}) {
    for (const std::uint8_t scale : {0x80, 0xb8}) {
      kit::QuantizedMemory memory(format_named("nvfp4"), 3, 64);
      const std::vector<float> weights(3 * 64, 0.5f);
      quantize(TensorView(weights.data(), DType::f32, {3, 64}), {}, memory.matrix());
      kit::PackedMemory(memory.matrix(), false, order);
      static_cast<std::uint8_t*>(memory.matrix().scales.data)[6] = scale;
      try {
        kit::PackedMemory(memory.matrix(), false, order);
        ADD_FAILURE() << "was accepted";
      } catch (const Error& error) {
        const std::string wanted = std::string("matrix.scales[1, 2] is ") + (scale == 0x80 ? "-0" : "-1") + ": order " +
                                   name_of(order) + " has no negative scales";
        EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace heddle::lowbit

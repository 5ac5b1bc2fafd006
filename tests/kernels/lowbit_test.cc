// Quantisation and back on every SIMD target: the bits of the reference, whatever the weights.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "core/dtypes.h"
#include "kernels/candidates.h"
#include "kit/lowbit_weights.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle::lowbit {
namespace {

using kit::Draw;
using kit::HostTensor;
using kit::Layout;
using kit::QuantizedMemory;

void expect_reference_bits(const HostTensor& weights, const QuantizeOptions& options, const Format& format) {
  const kit::QuantizedByReference expected(weights, options, format);
  ASSERT_TRUE(expected.memory.guards_intact());
  kit::on_each_target([&] { ASSERT_EQ(expected.difference(weights, options), ""); });
}

class LowbitFormats : public ::testing::TestWithParam<std::string> {
 protected:
  Format format() const { return format_named(GetParam()); }
  // Odd sizes for rows, several groups else.
  std::vector<std::int64_t> widths() const {
    if (format().group == 0) return {1, 7, 33, 4096 + 21};
    if (format().group > 128) return {4096, 8192};
    return {format().group, 3 * format().group, 4096 + 128};
  }
};

TEST_P(LowbitFormats, BitsOfTheReference) {
  std::uint32_t seed = 0;
  for (const ScaleRule rule : kit::rules_of(format())) {
    for (const Draw draw : {Draw::gaussian, Draw::ties, Draw::signs, Draw::outliers, Draw::tiny, Draw::huge}) {
      for (const std::int64_t K : widths()) {
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          if (dtype != DType::f32 && K == widths().back()) continue;
          SCOPED_TRACE(name_of(rule) + std::string(" draw ") + std::to_string(static_cast<int>(draw)) + " K " +
                       std::to_string(K) + " " + name_of(dtype));
          const Layout layout = seed % 3 == 1   ? Layout::strided_dim
                                : seed % 3 == 2 ? Layout::reversed
                                                : Layout::contiguous;
          const HostTensor weights = kit::draw_weights(draw, dtype, 3, K, format().element, ++seed, layout);
          expect_reference_bits(weights, {.rule = rule, .importance = {}}, format());
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(LowbitFormats, ImportanceCountsAsTheReferenceSays) {
  const std::int64_t K = widths().back();
  std::mt19937 random(5);
  std::vector<float> importance(static_cast<std::size_t>(K));
  for (float& h : importance) h = random() % 5 == 0 ? 0.0f : std::exp(std::normal_distribution<float>()(random));
  for (const ScaleRule rule : kit::rules_of(format())) {
    if (!searches(rule)) continue;
    SCOPED_TRACE(name_of(rule));
    const HostTensor weights = kit::draw_weights(Draw::student, DType::f32, 3, K, format().element, 9);
    const QuantizeOptions options{.rule = rule, .importance = TensorView(importance.data(), DType::f32, {K})};
    expect_reference_bits(weights, options, format());
    // Not the same as without, but for row formats, where one factor may be best for both.
    if (format().group == 0) continue;
    const kit::QuantizedByReference with(weights, options, format());
    EXPECT_NE(with.difference(weights, {.rule = rule, .importance = {}}), "");
  }
}

TEST_P(LowbitFormats, ThreadsDoNotChangeBits) {
  const std::int64_t K = std::max<std::int64_t>(512, format().group);
  const HostTensor weights = kit::draw_weights(Draw::gaussian, DType::f32, 301, K, format().element, 3);
  QuantizedMemory one(format(), 301, K), four(format(), 301, K);
  for (const auto& [memory, threads] : {std::pair{&one, 1}, std::pair{&four, 4}}) {
    const auto pool = make_thread_pool(threads);
    quantize(weights.view(), {}, memory->matrix(), {{}, pool.get(), nullptr});
  }
  EXPECT_EQ(one.difference(four), "");
}

TEST_P(LowbitFormats, WhatDecodesExactlyComesBack) {
  // Quantising what was dequantised finds the same numbers again: the largest code is in use in each group.
  if (format().zero_points) return;  // a rounded zero point moves the range
  const std::int64_t K = std::max<std::int64_t>(256, format().group);
  const HostTensor weights = kit::draw_weights(Draw::gaussian, DType::f32, 4, K, format().element, 3);
  QuantizedMemory first(format(), 4, K), second(format(), 4, K);
  quantize(weights.view(), {}, first.matrix());
  const HostTensor values = HostTensor::output(DType::f32, {4, K}), again = HostTensor::output(DType::f32, {4, K});
  dequantize(first.matrix(), values.view());
  quantize(values.view(), {}, second.matrix());
  dequantize(second.matrix(), again.view());
  for (std::int64_t i = 0; i < 4 * K; ++i) EXPECT_NEAR(again.get(i), values.get(i), 2e-6 * std::abs(values.get(i)));
}

TEST_P(LowbitFormats, NothingIsAMatrixToo) {
  const std::int64_t group = std::max<std::int64_t>(format().group, 1);
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{0, group}, {2, 0}, {0, 0}}) {
    const HostTensor weights = HostTensor::input(DType::f32, {N, K}), out = HostTensor::output(DType::f32, {N, K});
    QuantizedMemory memory(format(), N, K);
    quantize(weights.view(), {}, memory.matrix());
    dequantize(memory.matrix(), out.view());
    EXPECT_TRUE(memory.guards_intact());
  }
}

std::vector<std::string> all_formats() {
  std::vector<std::string> names = format_names();
  names.insert(names.end(), {"nf4_b32", "nf4_b4096", "fp4_bnb_b256"});
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, LowbitFormats, ::testing::ValuesIn(all_formats()),
                         [](const auto& info) { return info.param; });

// Every byte that may stand in storage decodes as the reference says, made by quantize() or not.
TEST(Lowbit, EveryCodeAndScaleDecodes) {
  for (const std::string& name : all_formats()) {
    SCOPED_TRACE(name);
    const Format format = format_named(name);
    const std::int64_t N = 256, K = std::max<std::int64_t>(format.group, 32);
    QuantizedMemory memory(format, N, K);
    std::mt19937 random(1);
    auto* codes = static_cast<std::uint8_t*>(memory.matrix().codes.data);
    for (std::int64_t i = 0; i < memory.matrix().codes.elements(); ++i) codes[i] = static_cast<std::uint8_t>(i % 257);
    const TensorView& scales = memory.matrix().scales;
    for (std::int64_t i = 0; i < scales.elements(); ++i) {
      if (size_of(scales.dtype) == 1) static_cast<std::uint8_t*>(scales.data)[i] = static_cast<std::uint8_t>(i);
      if (scales.dtype == DType::f16)
        static_cast<std::uint16_t*>(scales.data)[i] = static_cast<std::uint16_t>(random());
      if (scales.dtype == DType::f32)
        static_cast<float*>(scales.data)[i] = std::ldexp(1.1f, static_cast<int>(i % 80) - 40);
    }
    for (std::int64_t i = 0; i < memory.matrix().zeros.elements(); ++i) {
      static_cast<std::uint8_t*>(memory.matrix().zeros.data)[i] = static_cast<std::uint8_t>(i % 16);
    }
    if (format.global_scale) *static_cast<float*>(memory.matrix().global_scale.data) = 0.37f;
    const Matrix matrix = checked_matrix(Check("test"), memory.matrix(), "matrix");
    kit::on_each_target([&] {
      const HostTensor out = HostTensor::output(DType::f32, {N, K});
      dequantize(memory.matrix(), out.view());
      for (std::int64_t i = 0; i < N * K; ++i) {
        const float wanted = reference::dequantized(matrix, i / K, i % K);
        const auto found = static_cast<float>(out.get(i));
        if (std::isnan(wanted)) {
          ASSERT_TRUE(std::isnan(found)) << i;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(wanted)) << i;
        }
      }
    });
  }
}

TEST(Lowbit, AGlobalScaleMayBeShared) {
  const HostTensor weights = kit::draw_weights(Draw::gaussian, DType::f32, 4, 64, Element::e2m1, 3);
  QuantizedMemory memory(format_named("nvfp4"), 4, 64);
  for (const float shared : {0.01f, 1e-45f, 1e30f}) {
    quantize(weights.view(), {.importance = {}, .global_scale = shared}, memory.matrix());
    EXPECT_EQ(*static_cast<float*>(memory.matrix().global_scale.data), shared);
    expect_reference_bits(weights, {.importance = {}, .global_scale = shared}, format_named("nvfp4"));
  }
}

// Bit by bit, by hand.
TEST(Lowbit, BytesOfKnownMatrices) {
  const auto bytes = [](const char* format, std::vector<float> row, ScaleRule rule = ScaleRule::plain) {
    const auto K = static_cast<std::int64_t>(row.size());
    QuantizedMemory memory(format_named(format), 1, K);
    quantize(TensorView(row.data(), DType::f32, {1, K}), {.rule = rule, .importance = {}}, memory.matrix());
    const auto* codes = static_cast<const std::uint8_t*>(memory.matrix().codes.data);
    return std::vector<int>(codes, codes + memory.matrix().codes.elements());
  };
  // Even columns in the high half, the seventh beside a zero; -0.25 is no -0 and 0.75 is 0.5 there.
  EXPECT_EQ(bytes("e2m1_row", {6, -6, 0.75f, -0.25f, 1, 3, -4}), (std::vector<int>{0x7f, 0x10, 0x25, 0xe0}));
  // Even columns in the low half, ties to even, -0 kept.
  std::vector<float> row(32, 0.0f);
  row[0] = 6, row[1] = -6, row[2] = 0.75f, row[3] = -0.25f, row[4] = 1, row[5] = 3, row[31] = -4;
  std::vector<int> expected(16, 0);
  expected[0] = 0xf7, expected[1] = 0x82, expected[2] = 0x52, expected[15] = 0xe0;
  EXPECT_EQ(bytes("mxfp4", row), expected);
  for (float& w : row) w *= 7.0f / 6.0f;  // int4: 7 is the largest
  row[2] = 2.5f, row[3] = 3.5f, row[4] = row[5] = 0;
  expected.assign(16, 0x88);
  expected[0] = 0x1f, expected[1] = 0xca, expected[15] = 0x38;
  EXPECT_EQ(bytes("int4_g32", row), expected);
}

}  // namespace
}  // namespace heddle::lowbit

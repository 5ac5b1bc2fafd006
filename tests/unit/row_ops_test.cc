#include "cpu/row_ops.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "core/dtypes.h"
#include "heddle/runtime.h"

namespace heddle {
namespace {

class RowOps : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { set_cpu_target(GetParam()); }
  void TearDown() override { set_cpu_target(""); }
};

TEST_P(RowOps, GeluIsExactToRounding) {
  std::vector<float> x;
  for (int i = -200'000; i <= 200'000; ++i) x.push_back(static_cast<float>(i) * 5e-5f);
  for (float small = 1e-3f; small > 1e-38f; small /= 3) x.insert(x.end(), {small, -small});
  x.insert(x.end(), {0.0f, -0.0f, 1e30f, -1e30f, std::numeric_limits<float>::infinity()});
  std::vector<float> found(x.size());
  gelu(x.data(), static_cast<std::int64_t>(x.size()), DType::f32, found.data());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isinf(x[i])) {
      EXPECT_EQ(found[i], x[i]);
      continue;
    }
    const double exact = 0.5 * x[i] * std::erfc(-static_cast<double>(x[i]) / std::sqrt(2.0));
    // Relative to |x|: below 0 the two terms of x/2 (1 + erf) cancel.
    const double error = std::abs(found[i] - exact) / std::max(std::abs(static_cast<double>(x[i])), 1e-37);
    ASSERT_TRUE(error <= 1.5e-7) << x[i] << ": " << found[i] << " for " << exact;
    worst = std::max(worst, error);
  }
  RecordProperty("worst", std::to_string(worst));
  const float nan = std::nanf("");
  gelu(&nan, 1, DType::f32, found.data());
  EXPECT_TRUE(std::isnan(found[0]));
}

TEST_P(RowOps, NarrowRoundsAsTheScalarConversion) {
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 0xffff0000u; bits += 0x7ff9u) x.push_back(std::bit_cast<float>(bits));
  for (const std::uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u, 0x7f800000u, 0xff800000u, 0x7f7fffffu}) {
    x.push_back(std::bit_cast<float>(bits));
  }
  std::vector<std::uint16_t> found(x.size());
  narrow(x.data(), static_cast<std::int64_t>(x.size()), found.data());
  std::vector<float> back(x.size());
  widen(found.data(), static_cast<std::int64_t>(x.size()), back.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(back[i])) << std::hex << std::bit_cast<std::uint32_t>(x[i]);
    } else {
      ASSERT_EQ(found[i], f32_to_bf16(x[i])) << x[i];
      ASSERT_EQ(back[i], bf16_to_f32(found[i]));
    }
  }
}

TEST_P(RowOps, LayerNormAddsTheResidual) {
  for (const std::int64_t columns : {1, 3, 16, 37, 384}) {
    const std::int64_t rows = 3;
    std::vector<float> x(rows * columns), residual(x.size()), gamma(columns), beta(columns);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = 100.0f + std::sin(static_cast<float>(i));
      residual[i] = 3 * std::cos(static_cast<float>(7 * i));
    }
    for (std::int64_t j = 0; j < columns; ++j) {
      gamma[j] = 1.0f + 0.01f * static_cast<float>(j);
      beta[j] = -0.02f * static_cast<float>(j);
    }
    std::vector<float> expected(x.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      double mean = 0, variance = 0;
      const auto value = [&](std::int64_t j) {
        return static_cast<double>(x[row * columns + j] + residual[row * columns + j]);
      };
      for (std::int64_t j = 0; j < columns; ++j) mean += value(j) / columns;
      for (std::int64_t j = 0; j < columns; ++j) variance += std::pow(value(j) - mean, 2) / columns;
      for (std::int64_t j = 0; j < columns; ++j) {
        expected[row * columns + j] =
            static_cast<float>((value(j) - mean) / std::sqrt(variance + 1e-5) * gamma[j] + beta[j]);
      }
    }
    // In place over the residual, as the encoder does it.
    residual_layer_norm(x.data(), residual.data(), rows, {gamma.data(), beta.data(), 1e-5f, columns}, DType::f32,
                        residual.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_TRUE(std::abs(residual[i] - expected[i]) <= 2e-4)
          << columns << " columns, " << i << ": " << residual[i] << " for " << expected[i];
    }
  }
}

TEST_P(RowOps, LayerNormInBf16IsTheRoundedOneInF32) {
  const std::int64_t columns = 45;
  std::vector<float> x(columns), same(columns), gamma(columns, 1.5f), beta(columns, 0.25f), residual(columns);
  std::vector<std::uint16_t> narrow_residual(columns), found(columns);
  for (std::int64_t j = 0; j < columns; ++j) {
    x[j] = same[j] = std::sin(static_cast<float>(3 * j));
    narrow_residual[j] = f32_to_bf16(std::cos(static_cast<float>(j)));
    residual[j] = bf16_to_f32(narrow_residual[j]);
  }
  std::vector<float> wide(columns);
  const LayerNormRows norm{gamma.data(), beta.data(), 1e-12f, columns};
  residual_layer_norm(x.data(), residual.data(), 1, norm, DType::f32, wide.data());
  residual_layer_norm(same.data(), narrow_residual.data(), 1, norm, DType::bf16, found.data());
  for (std::int64_t j = 0; j < columns; ++j) EXPECT_EQ(found[j], f32_to_bf16(wide[j])) << j;
}

TEST_P(RowOps, SumsOfRows) {
  const std::int64_t count = 21;
  std::vector<float> a(count), b(count), c(count), out(count), sum(count, 1.0f);
  std::vector<std::uint16_t> a16(count), b16(count), c16(count);
  for (std::int64_t i = 0; i < count; ++i) {
    a[i] = static_cast<float>(i), b[i] = static_cast<float>(2 * i), c[i] = -5.0f;
    a16[i] = f32_to_bf16(a[i]), b16[i] = f32_to_bf16(b[i]), c16[i] = f32_to_bf16(c[i]);
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const bool f32 = dtype == DType::f32;
    add_three(f32 ? static_cast<void*>(a.data()) : a16.data(), f32 ? static_cast<void*>(b.data()) : b16.data(),
              f32 ? static_cast<void*>(c.data()) : c16.data(), count, dtype, out.data());
    accumulate(f32 ? static_cast<void*>(a.data()) : a16.data(), count, dtype, sum.data());
    for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(out[i], static_cast<float>(3 * i - 5)) << i;
  }
  for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(sum[i], static_cast<float>(1 + 2 * i)) << i;
}

INSTANTIATE_TEST_SUITE_P(Targets, RowOps, testing::ValuesIn(cpu_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace heddle

#include "model/linear.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "core/dtypes.h"
#include "heddle/runtime.h"

namespace heddle {
namespace {

struct LinearCase {
  std::int64_t out, in;
  DType dtype, y_dtype;
};

void PrintTo(const LinearCase& c, std::ostream* stream) {
  *stream << c.out << "x" << c.in << " " << name_of(c.dtype) << " to " << name_of(c.y_dtype);
}

class LinearLayer : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearLayer, MatchesDoubleForEveryRowCount) {
  const auto [out, in, dtype, y_dtype] = GetParam();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto rounded = [&](float value) { return dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(value)) : value; };
  std::vector<float> weight(out * in), bias(out), x(kLinearRows * in);
  for (float& value : weight) value = normal(random);
  for (float& value : bias) value = normal(random);
  for (float& value : x) value = rounded(normal(random));
  std::vector<std::byte> given(x.size() * size_of(dtype));
  for (std::size_t i = 0; i < x.size(); ++i) store_element(given.data(), dtype, i, x[i]);

  const FloatLinear layer(weight.data(), bias.data(), out, in, dtype, y_dtype);
  WorkspaceBuffer scratch;
  void* space = scratch.get(layer.scratch_bytes()).data;
  std::vector<std::byte> all(kLinearRows * out * size_of(y_dtype));
  layer.run(given.data(), all.data(), kLinearRows, space);
  for (std::int64_t row = 0; row < kLinearRows; ++row) {
    for (std::int64_t column = 0; column < out; ++column) {
      double exact = bias[column], magnitude = std::abs(exact);
      for (std::int64_t i = 0; i < in; ++i) {
        const double product = static_cast<double>(x[row * in + i]) * rounded(weight[column * in + i]);
        exact += product;
        magnitude += std::abs(product);
      }
      const double found = load_element(all.data(), y_dtype, row * out + column);
      // Sums of n f32 products; then one rounding to y's format.
      const double bound = magnitude * 6e-8 * (2 + std::sqrt(static_cast<double>(in))) +
                           (y_dtype == DType::bf16 ? std::abs(exact) / 256 : 0.0);
      ASSERT_TRUE(std::abs(found - exact) <= bound) << row << ", " << column << ": " << found << " for " << exact;
    }
  }

  for (std::int64_t rows = 1; rows < kLinearRows; rows += 5) {
    const std::int64_t held = (rows + kLinearRowStep - 1) / kLinearRowStep * kLinearRowStep;
    std::vector<std::byte> some(held * out * size_of(y_dtype));
    layer.run(given.data(), some.data(), rows, space);
    ASSERT_EQ(std::memcmp(some.data(), all.data(), rows * out * size_of(y_dtype)), 0) << rows << " rows";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Linear, LinearLayer,
    testing::Values(LinearCase{1, 1, DType::f32, DType::f32}, LinearCase{150, 36, DType::f32, DType::f32},
                    LinearCase{384, 1536, DType::f32, DType::f32}, LinearCase{1, 1, DType::bf16, DType::bf16},
                    LinearCase{150, 37, DType::bf16, DType::f32}, LinearCase{257, 129, DType::bf16, DType::bf16},
                    LinearCase{1152, 384, DType::bf16, DType::bf16}, LinearCase{384, 1536, DType::bf16, DType::f32}));

}  // namespace
}  // namespace heddle

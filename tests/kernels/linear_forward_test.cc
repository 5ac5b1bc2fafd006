// Linear layers over packed weights on every SIMD target, against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "cpu/linear.h"
#include "kernels/candidates.h"
#include "kernels/linear_cases.h"
#include "kit/linear_layer.h"
#include "lowbit/packed.h"
#include "ops/linear/arguments.h"
#include "ops/linear/choice.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle {
namespace {

using kit::expect_right;
using kit::HostTensor;
using kit::kActivations;
using kit::kDtypes;
using kit::Layout;
using kit::LinearCase;
using kit::LinearLayer;
using kit::PackedMemory;
using kit::QuantizedMemory;
using kit::words;

class LinearFormats : public ::testing::TestWithParam<std::string> {
 protected:
  lowbit::Format format() const { return lowbit::format_named(GetParam()); }
  // Columns: tails of vectors and of bytes for row formats; one, few and many groups, beyond a block, else.
  std::vector<std::int64_t> columns() const {
    const std::int64_t group = format().group;
    if (group == 0) return {1, 7, 33, 128, 301};
    return {group, 3 * group, std::max<std::int64_t>(320 / group, 1) * group};
  }
};

TEST_P(LinearFormats, AgreesWithDoublePrecision) {
  for (const kit::NamedLinearCase& c : kit::linear_forward_cases(GetParam())) {
    expect_right(c.spec);
    if (HasFailure()) return;
  }
}

TEST_P(LinearFormats, DecodesEveryWeightAsStored) {
  // Rows of an identity pick weights: one product, and zeros added to it.
  const std::int64_t N = 67, K = std::max<std::int64_t>(format().group, 64);
  LinearCase c{.format = GetParam(), .rows = {K}, .N = N, .K = K};
  const LinearLayer layer(c);
  const lowbit::Matrix matrix = lowbit::checked_matrix(Check("test"), layer.quantized.matrix(), "matrix");
  const std::int64_t counts[] = {1, 2, 4, 8, 9, K};
  for (const DType dtype : kDtypes) {
    HostTensor x = HostTensor::input(dtype, {K, K});
    for (std::int64_t i = 0; i < K * K; ++i) x.set(i, i / K == i % K ? 1 : 0);
    kit::on_each_target([&] {
      for (const std::int64_t M : counts) {
        const HostTensor y = HostTensor::output(dtype, {M, N});
        TensorView rows = x.view();
        rows.shape[0] = M;
        kit::call_linear(rows, layer.packed.weights(), y.view(), {});
        for (std::int64_t i = 0; i < M * N; ++i) {
          const double wanted =
              kit::rounded(lowbit::packed_value({matrix.format, lowbit::panel_layout(matrix.format, N, K),
                                                 static_cast<const std::uint8_t*>(layer.packed.weights().data.data)},
                                                i % N, i / N),
                           dtype);
          // Pairs of bf16 are rounded without the global scale, and then with it.
          const double slack = dtype == DType::bf16 && matrix.format.global_scale ? std::abs(wanted) * 0x1p-8 : 0;
          ASSERT_LE(std::abs(y.get(i) - wanted), slack) << name_of(dtype) << " M " << M << " at " << i;
        }
      }
    });
  }
}

TEST_P(LinearFormats, PackingKeepsEveryWeight) {
  for (const std::int64_t K : columns()) {
    const std::int64_t N = 37;
    QuantizedMemory memory(format(), N, K);
    std::mt19937 random(7);
    const lowbit::QuantizedMatrix& m = memory.matrix();
    const auto fill = [&](const TensorView& view, unsigned limit) {
      for (std::int64_t i = 0; i < view.elements(); ++i) {
        static_cast<std::uint8_t*>(view.data)[i] = static_cast<std::uint8_t>(random() % limit);
      }
    };
    const bool floats = format().element == lowbit::Element::e4m3;
    fill(m.codes, floats ? 127 : 256);
    if (m.zeros.given()) fill(m.zeros, 16);
    for (std::int64_t i = 0; i < m.scales.elements(); ++i) {
      if (m.scales.dtype == DType::f32) static_cast<float*>(m.scales.data)[i] = std::ldexp(1.1f, i % 80 - 40);
      if (m.scales.dtype == DType::f16)
        static_cast<std::uint16_t*>(m.scales.data)[i] = static_cast<std::uint16_t>(random() % 0x7c00);
      if (size_of(m.scales.dtype) == 1)
        static_cast<std::uint8_t*>(m.scales.data)[i] = static_cast<std::uint8_t>(random() % 127);
    }
    if (m.global_scale.given()) *static_cast<float*>(m.global_scale.data) = 0.37f;
    const PackedMemory packed(m);
    EXPECT_TRUE(packed.guards_intact());
    const lowbit::Matrix matrix = lowbit::checked_matrix(Check("test"), m, "matrix");
    const lowbit::Panels panels = panels_of(packed.weights());
    for (std::int64_t i = 0; i < N * K; ++i) {
      const float wanted = reference::dequantized(matrix, i / K, i % K);
      const float found = lowbit::packed_value(panels, i / K, i % K);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(wanted)) << K << ": " << i;
    }
    // And every one of those through the kernels, columns of W one at a time.
    HostTensor x = HostTensor::input(DType::f32, {1, K});
    kit::on_each_target([&] {
      for (const std::int64_t k : {std::int64_t{0}, K / 2, K - 1}) {
        for (std::int64_t i = 0; i < K; ++i) x.set(i, i == k ? 1 : 0);
        const HostTensor y = HostTensor::output(DType::f32, {1, N});
        kit::call_linear(x.view(), packed.weights(), y.view(), {});
        for (std::int64_t n = 0; n < N; ++n) ASSERT_EQ(y.get(n), reference::dequantized(matrix, n, k)) << n;
      }
    });
  }
}

TEST_P(LinearFormats, ARowsBitsDoNotDependOnTheOthers) {
  const std::int64_t N = 50, K = columns().back(), M = 133;
  for (const DType dtype : kDtypes) {
    const LinearLayer layer(LinearCase{.format = GetParam(), .rows = {M}, .N = N, .K = K, .dtype = dtype});
    LinearOptions options;
    options.batch_invariant = dtype == DType::bf16;  // f32 and f16 promise it without
    const auto one = make_thread_pool(1), three = make_thread_pool(3);
    kit::on_each_target([&] {
      const HostTensor all = HostTensor::output(dtype, {M, N});
      kit::call_linear(layer.x.view(), layer.packed.weights(), all.view(), options, one.get());
      for (const auto& [first, count] :
           {std::pair{0, 1}, {3, 2}, {5, 3}, {8, 4}, {12, 7}, {40, 8}, {20, 100}, {132, 1}}) {
        TensorView rows = layer.x.view();
        rows.data = static_cast<std::byte*>(rows.data) + first * K * static_cast<std::int64_t>(size_of(dtype));
        rows.shape[0] = count;
        const HostTensor y = HostTensor::output(dtype, {count, N});
        kit::call_linear(rows, layer.packed.weights(), y.view(), options, three.get());
        for (std::int64_t i = 0; i < count * N; ++i) ASSERT_EQ(y.get(i), all.get(first * N + i)) << count << ": " << i;
      }
    });
  }
}

std::string name_of_format(const ::testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(BothWays, LinearFormats, ::testing::ValuesIn(kit::kBackwardFormats), name_of_format);
INSTANTIATE_TEST_SUITE_P(Forward, LinearFormats, ::testing::ValuesIn(kit::kForwardFormats), name_of_format);

TEST(LinearForward, EveryActivationWithEverything) {
  for (const Activation activation : kActivations) {
    for (const DType dtype : kDtypes) {
      for (const std::int64_t M : {3, 40}) {
        expect_right({.rows = {M},
                      .N = 114,
                      .K = 512,
                      .dtype = dtype,
                      .activation = activation,
                      .bias = true,
                      .residual = true,
                      .seed = 5});
      }
    }
  }
}

TEST(LinearForward, ScalesFarApart) {
  for (const DType dtype : kDtypes) {
    for (const std::int64_t M : {1, 20}) {
      expect_right({.format = "mxfp4", .rows = {M}, .N = 99, .K = 320, .dtype = dtype, .raised = 13});
    }
  }
}

TEST(LinearForward, ProductsInIntegers) {
  std::uint32_t turn = 0;
  for (const char* format :
       {"nvfp4", "mxfp4", "int4_g32", "int4_g128", "int4_g32_zp", "int4_g128_zp", "e2m1_row", "int8_row"}) {
    const std::int64_t group = lowbit::format_named(format).group;
    for (const std::int64_t M : {0, 1, 2, 3, 4, 7, 33, 130}) {
      for (const DType dtype : kDtypes) {
        const std::int64_t widths[] = {group == 0 ? 7 : group, group == 0 ? 4096 + 301 : 3 * group};
        LinearCase c{.format = format, .rows = {M}, .N = 51, .K = widths[turn % 2], .dtype = dtype};
        c.activation = kActivations[turn % std::size(kActivations)];
        c.N += c.activation == Activation::swiglu;
        c.bias = turn % 2 == 0;
        c.residual = turn % 3 == 0;
        c.int8_x = true;
        c.seed = ++turn;
        expect_right(c);
        if (HasFailure()) return;
      }
    }
  }
}

// The largest x has 127 and zeros have 0: such rows are exact, as are sums of codes below 2^24.
TEST(LinearForward, ProductsInIntegersAreExact) {
  const std::int64_t K = 4096 + 128, N = 20;
  for (const char* format : {"e2m1_row", "int4_g128_zp", "int4_g128", "int8_row"}) {
    LinearCase c{.format = format, .rows = {3}, .N = N, .K = K};
    const LinearLayer layer(c);
    HostTensor x = HostTensor::input(DType::f32, {3, K});
    for (std::int64_t i = 0; i < 3 * K; ++i) x.set(i, i / K == 2 ? 0 : (i % 2 == 0) == (i / K == 0) ? 2 : -2);
    LinearOptions slow;
    slow.force = "reference";
    const HostTensor wanted = HostTensor::output(DType::f32, {3, N});
    kit::call_linear(x.view(), layer.packed.weights(), wanted.view(), slow);
    kit::on_each_target([&] {
      LinearOptions options;
      options.int8_x = true;
      const HostTensor y = HostTensor::output(DType::f32, {3, N});
      kit::call_linear(x.view(), layer.packed.weights(), y.view(), options);
      for (std::int64_t i = 0; i < 3 * N; ++i) ASSERT_NEAR(y.get(i), wanted.get(i), 2e-5 * 2 * 64) << format << i;
      for (std::int64_t n = 0; n < N; ++n) ASSERT_EQ(y.get(2 * N + n), 0) << format << n;
    });
  }
}

// Products of the largest numbers, -128 among the weights, which quantize() does not write and a checkpoint may.
TEST(LinearForward, ProductsInIntegersOfTheLargestNumbers) {
  const std::int64_t K = 3 * 4096 + 40, N = 35;
  QuantizedMemory memory(lowbit::format_named("int8_row"), N, K);
  const lowbit::QuantizedMatrix& m = memory.matrix();
  for (std::int64_t i = 0; i < N * K; ++i) {
    const std::int64_t n = i / K, pattern = n % 5;
    static_cast<std::int8_t*>(m.codes.data)[i] = static_cast<std::int8_t>(pattern == 0   ? -128
                                                                          : pattern == 1 ? 127
                                                                          : pattern == 2 ? (i % 2 == 0 ? -128 : 127)
                                                                                         : i * 37 % 256 - 128);
  }
  for (std::int64_t n = 0; n < N; ++n) static_cast<float*>(m.scales.data)[n] = 1.0f;
  const PackedMemory packed(m);
  HostTensor x = HostTensor::input(DType::f32, {5, K});
  for (std::int64_t i = 0; i < 5 * K; ++i) {
    x.set(i, i / K == 0   ? 127
             : i / K == 1 ? -127
             : i / K == 2 ? (i % 2 == 0 ? -127 : 127)
             : i % K == 0 ? 127
                          : i % 254 - 127);
  }
  kit::on_each_target([&] {
    LinearOptions options;
    options.int8_x = true;
    const HostTensor y = HostTensor::output(DType::f32, {5, N});
    kit::call_linear(x.view(), packed.weights(), y.view(), options);
    for (std::int64_t i = 0; i < 5 * N; ++i) {
      std::int64_t exact = 0;
      for (std::int64_t k = 0; k < K; ++k) {
        exact += static_cast<std::int64_t>(x.get(i / N * K + k)) *
                 static_cast<const std::int8_t*>(m.codes.data)[i % N * K + k];
      }
      // Four spans, each rounded to f32, and their sum.
      ASSERT_NEAR(y.get(i), static_cast<double>(exact), 4 * 0x1p-24 * 128 * 127 * static_cast<double>(K)) << i;
    }
  });
}

TEST(LinearForward, RowsInIntegersDoNotDependOnTheOthers) {
  const std::int64_t N = 50, K = 384, M = 133;
  for (const DType dtype : kDtypes) {
    LinearCase c{
        .format = dtype == DType::f16 ? "int8_row" : "int4_g128_zp", .rows = {M}, .N = N, .K = K, .dtype = dtype};
    LinearLayer layer(c);
    layer.x.set(7 * K + 3, std::nan(""));
    layer.x.set(9 * K + 3, INFINITY);
    LinearOptions options;
    options.int8_x = true;
    kit::on_each_target([&] {
      const HostTensor all = HostTensor::output(dtype, {M, N});
      kit::call_linear(layer.x.view(), layer.packed.weights(), all.view(), options);
      for (std::int64_t m = 0; m < M; ++m) {
        TensorView row = layer.x.view();
        row.data = static_cast<std::byte*>(row.data) + m * K * static_cast<std::int64_t>(size_of(dtype));
        row.shape[0] = 1;
        const HostTensor y = HostTensor::output(dtype, {1, N});
        kit::call_linear(row, layer.packed.weights(), y.view(), options);
        for (std::int64_t n = 0; n < N; ++n) {
          if (m == 7 || m == 9) {
            ASSERT_TRUE(std::isnan(y.get(n)) && std::isnan(all.get(m * N + n))) << m;
          } else {
            ASSERT_EQ(y.get(n), all.get(m * N + n)) << m << " " << n;
          }
        }
      }
    });
  }
}

TEST(LinearForward, NothingToDo) {
  for (const auto& [M, N, K] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{0, 64, 64}, {3, 0, 64}, {3, 64, 0}}) {
    for (const DType dtype : kDtypes) {
      expect_right({.rows = {M}, .N = N, .K = K, .dtype = dtype, .bias = true});
      expect_right({.rows = {M, 2, 3}, .N = N, .K = K, .dtype = dtype, .activation = Activation::swiglu});
    }
  }
}

TEST(LinearForward, TheReferenceIsACandidate) {
  const LinearLayer layer(LinearCase{.rows = {3}, .N = 34, .activation = Activation::swiglu, .bias = true});
  LinearOptions options = layer.options();
  options.force = "reference";
  const kit::Comparison verdict = layer.run(options);
  EXPECT_LE(verdict.error, 0x1p-24 * 512) << verdict.worst;  // one rounding of what is below 512
  const std::vector<Candidate> list = explain_linear(layer.x.view(), layer.packed.weights(), options);
  ASSERT_GE(list.size(), 2u);
  EXPECT_FALSE(list[0].chosen);
  EXPECT_EQ(list[0].reason, "another candidate was asked for by name");
  EXPECT_TRUE(list[1].chosen);
  EXPECT_TRUE(explain_linear(layer.x.view(), layer.packed.weights(), layer.options())[0].chosen);
}

// Activations of sums that are huge, infinite or NaN; a NaN in x stays in its row.
TEST(LinearForward, ValuesThatAreNotFinite) {
  const std::int64_t K = 32, N = 48;
  std::vector<float> weights(N * K, 0.0f);
  for (std::int64_t n = 0; n < N; ++n) weights[static_cast<std::size_t>(n * K)] = 6.0f;
  QuantizedMemory memory(lowbit::format_named("e2m1_row"), N, K);
  lowbit::quantize(TensorView(weights.data(), DType::f32, {N, K}), {}, memory.matrix());
  const float values[] = {1e4f, -1e4f, 3e37f, -3e37f, 88.0f, -88.0f, -15.0f, std::nanf(""), 0.0f};
  const auto M = static_cast<std::int64_t>(std::size(values));
  HostTensor x = HostTensor::input(DType::f32, {M, K});
  for (std::int64_t i = 0; i < M * K; ++i) x.set(i, i % K == 0 ? values[i / K] : 0.5);
  for (const Activation activation : kActivations) {
    SCOPED_TRACE(name_of(activation));
    const bool gated = activation == Activation::swiglu;
    const PackedMemory packed(memory.matrix(), gated);
    LinearOptions options;
    options.activation = activation;
    LinearOptions slow = options;
    slow.force = "reference";
    const HostTensor wanted = HostTensor::output(DType::f32, {M, gated ? N / 2 : N});
    kit::call_linear(x.view(), packed.weights(), wanted.view(), slow);
    kit::on_each_target([&] {
      const HostTensor y = HostTensor::output(DType::f32, {M, gated ? N / 2 : N});
      kit::call_linear(x.view(), packed.weights(), y.view(), options);
      for (std::int64_t i = 0; i < y.elements(); ++i) {
        const double found = y.get(i), right = wanted.get(i);
        if (!std::isfinite(right)) {
          ASSERT_TRUE(std::isnan(right) ? std::isnan(found) : found == right) << found << " " << right << " at " << i;
        } else {
          // gelu of a large negative number is a difference of nearly equal ones.
          ASSERT_NEAR(found, right, 4e-7 * std::abs(right) + 1e-4) << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace heddle

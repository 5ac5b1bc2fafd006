// Gradients of linear layers on every SIMD target: against double precision, which finite differences hold to account.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/candidates.h"
#include "kit/linear_gradients.h"
#include "kit/linear_table.h"

namespace heddle {
namespace {

using kit::HostTensor;
using kit::kActivations;
using kit::kDtypes;
using kit::kNorms;
using kit::Layout;
using kit::LinearCase;
using kit::LinearGradientLayer;

std::string words(const LinearCase& c) {
  std::string rows;
  for (const std::int64_t extent : c.rows) rows += std::to_string(extent) + " ";
  return c.format + " rows " + rows + "N " + std::to_string(c.N) + " K " + std::to_string(c.K) + " " +
         name_of(c.dtype) + " " + name_of(c.activation) + " " + name_of(c.norm) + (c.bias ? " bias" : "") +
         (c.int8_x ? " int8 x" : "") + " layout " + std::to_string(static_cast<int>(c.layout));
}

void expect_right(const LinearCase& c, const std::string& wanted = "xbwn", bool with_x = true) {
  SCOPED_TRACE(words(c) + " " + wanted);
  const LinearGradientLayer layer(c);
  EXPECT_EQ(layer.blind_spots(wanted), "");
  kit::on_each_target([&] {
    for (const bool invariant : {false, true}) {
      if (invariant && c.dtype != DType::bf16) continue;
      LinearOptions options = layer.layer.options();
      options.batch_invariant = invariant;
      for (const kit::Comparison& verdict : layer.run(options, wanted, with_x)) {
        EXPECT_TRUE(verdict.passed) << verdict.worst << "; error " << verdict.error << ", allowed " << verdict.bound;
      }
    }
  });
}

LinearGradients only(const HostTensor& dx) {
  LinearGradients gradients;
  gradients.dx = dx.view();
  return gradients;
}

class LinearBackwardFormats : public ::testing::TestWithParam<std::string> {};

TEST_P(LinearBackwardFormats, AgreesWithDoublePrecision) {
  for (const kit::NamedLinearCase& c : kit::linear_backward_cases(GetParam())) {
    expect_right(c.spec);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, LinearBackwardFormats, ::testing::ValuesIn(kit::kBackwardFormats),
                         [](const auto& info) { return info.param; });

TEST(LinearBackward, EveryActivationThroughEveryNorm) {
  std::uint32_t turn = 0;
  for (const Activation activation : kActivations) {
    for (const Norm norm : kNorms) {
      for (const DType dtype : kDtypes) {
        LinearCase c{.format = "nvfp4", .rows = {turn % 2 == 0 ? 3 : 40}, .N = 130, .K = 272, .dtype = dtype};
        c.activation = activation;
        c.norm = norm;
        c.norm_weight = turn % 4 != 3;
        c.bias = true;
        c.int8_x = turn % 5 == 4;
        c.seed = ++turn;
        expect_right(c);
      }
    }
  }
}

TEST(LinearBackward, EachGradientAlone) {
  for (const Norm norm : kNorms) {
    for (const Activation activation : {Activation::none, Activation::silu}) {
      for (const char* wanted : {"x", "b", "w", "n", "xb", ""}) {
        LinearCase c{.format = "int4_g32", .rows = {19}, .N = 130, .K = 160, .activation = activation, .bias = true};
        c.norm = norm;
        expect_right(c, wanted);
        if (norm == Norm::none && activation == Activation::none) expect_right(c, wanted, false);
      }
    }
  }
}

// The yardstick above, against the difference of two losses in double.
TEST(LinearBackward, FiniteDifferences) {
  for (const Activation activation : kActivations) {
    for (const Norm norm : kNorms) {
      LinearCase c{.format = "nvfp4", .rows = {2}, .N = 34, .K = 48, .activation = activation, .bias = true};
      c.norm = norm;
      c.x_mean = 0.3;
      SCOPED_TRACE(words(c));
      const LinearGradientLayer layer(c);
      constexpr double kStep = 1e-6;
      for (std::int64_t i = 0; i < 2 * c.K; ++i) {
        std::vector<double> x;
        for (std::int64_t k = 0; k < c.K; ++k) x.push_back(layer.layer.x.get(i / c.K * c.K + k));
        double& moved = x[static_cast<std::size_t>(i % c.K)];
        moved += kStep;
        const double above = layer.loss(i / c.K, x);
        moved -= 2 * kStep;
        const double below = layer.loss(i / c.K, x), found = layer.exact('x')[static_cast<std::size_t>(i)];
        ASSERT_NEAR((above - below) / (2 * kStep), found, 1e-5 * (1 + std::abs(found))) << i;
      }
    }
  }
}

TEST(LinearBackward, TheReferenceIsACandidate) {
  for (const Norm norm : kNorms) {
    LinearCase c{.rows = {3}, .N = 34, .activation = Activation::swiglu, .bias = true};
    c.norm = norm;
    const LinearGradientLayer layer(c);
    LinearOptions options = layer.layer.options();
    options.force = "reference";
    for (const kit::Comparison& verdict : layer.run(options)) {
      EXPECT_LE(verdict.error, 0x1p-24 * 4096) << verdict.worst;  // one rounding of what is below 4096
    }
  }
  const LinearGradientLayer layer(LinearCase{.rows = {3}, .N = 34});
  const HostTensor dx = HostTensor::output(DType::f32, {3, 64});
  LinearOptions options;
  const auto explained = [&] {
    return explain_linear_backward(layer.dy.view(), {}, layer.layer.packed.weights(), only(dx), options);
  };
  EXPECT_TRUE(explained()[0].chosen);
  EXPECT_EQ(explained()[1].reason, "it runs only when it is asked for");
  options.force = "reference";
  EXPECT_TRUE(explained()[1].chosen);
}

// A row of dx has the same bits in any batch and with any threads.
TEST(LinearBackward, ARowsBitsDoNotDependOnTheOthers) {
  for (const DType dtype : kDtypes) {
    LinearCase c{.format = "nf4", .rows = {133}, .N = 110, .K = 192, .dtype = dtype};
    c.activation = Activation::gelu_erf;
    c.norm = Norm::layer_norm;
    const LinearGradientLayer layer(c);
    LinearOptions options = layer.layer.options();
    options.batch_invariant = true;
    const auto one = make_thread_pool(1), three = make_thread_pool(3);
    kit::on_each_target([&] {
      const auto run = [&](std::int64_t first, std::int64_t count, Executor* executor) {
        TensorView dy = layer.dy.view(), x = layer.layer.x.view();
        const auto size = static_cast<std::int64_t>(size_of(dtype));
        dy.data = static_cast<std::byte*>(dy.data) + first * c.N * size;
        x.data = static_cast<std::byte*>(x.data) + first * c.K * size;
        dy.shape[0] = x.shape[0] = count;
        HostTensor dx = HostTensor::output(dtype, {count, c.K});
        kit::call_linear_backward(dy, x, layer.layer.packed.weights(), only(dx), options, executor);
        return dx;
      };
      const HostTensor all = run(0, 133, one.get());
      for (const auto& [first, count] : {std::pair{0, 1}, {5, 3}, {12, 7}, {20, 100}, {132, 1}}) {
        const HostTensor part = run(first, count, three.get());
        for (std::int64_t i = 0; i < count * c.K; ++i) ASSERT_EQ(part.get(i), all.get(first * c.K + i)) << count;
      }
    });
  }
}

TEST(LinearBackward, NothingToDo) {
  for (const auto& [M, N, K] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{0, 64, 64}, {3, 0, 64}, {3, 64, 0}}) {
    for (const Norm norm : {Norm::none, Norm::rms_norm}) {
      if (K == 0 && norm != Norm::none) continue;
      for (const Activation activation : {Activation::none, Activation::swiglu}) {
        LinearCase c{.rows = {M, 2}, .N = N, .K = K, .activation = activation, .bias = true};
        c.norm = norm;
        expect_right(c);
      }
    }
  }
}

// Slopes at sums that are huge, infinite or NaN; a NaN stays in its row.
TEST(LinearBackward, ValuesThatAreNotFinite) {
  const float values[] = {1e4f, -1e4f, 3e37f, -3e37f, 88.0f, -88.0f, INFINITY, -INFINITY, std::nanf(""), 0.0f};
  const auto M = static_cast<std::int64_t>(std::size(values));
  for (const Activation activation : kActivations) {
    if (activation == Activation::swiglu) continue;
    SCOPED_TRACE(name_of(activation));
    LinearCase c{.format = "int8_row", .rows = {M}, .N = 1, .K = 1, .activation = activation};
    LinearGradientLayer layer(c);
    for (std::int64_t i = 0; i < M; ++i) layer.layer.x.set(i, values[i]);
    LinearOptions options = layer.layer.options(), slow = options;
    slow.force = "reference";
    const HostTensor wanted = HostTensor::output(DType::f32, {M, 1});
    kit::call_linear_backward(layer.dy.view(), layer.layer.x.view(), layer.layer.packed.weights(), only(wanted), slow);
    kit::on_each_target([&] {
      const HostTensor dx = HostTensor::output(DType::f32, {M, 1});
      kit::call_linear_backward(layer.dy.view(), layer.layer.x.view(), layer.layer.packed.weights(), only(dx), options);
      for (std::int64_t i = 0; i < M; ++i) {
        if (i == 8 && activation != Activation::none && activation != Activation::relu) {
          ASSERT_TRUE(std::isnan(dx.get(i)) && std::isnan(wanted.get(i)));
        } else {
          ASSERT_NEAR(dx.get(i), wanted.get(i), 1e-6) << values[i];
        }
      }
    });
  }
}

}  // namespace
}  // namespace heddle

// Norms in front of linear layers on every SIMD target, against double precision.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/linear.h"
#include "kernels/candidates.h"
#include "kernels/linear_cases.h"
#include "kit/linear_layer.h"
#include "ops/linear/choice.h"

namespace heddle {
namespace {

using kit::expect_right;
using kit::HostTensor;
using kit::kActivations;
using kit::kDtypes;
using kit::Layout;
using kit::LinearCase;
using kit::LinearLayer;

TEST(LinearNorms, InFront) {
  std::uint32_t turn = 0;
  for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
    for (const std::int64_t K : {1, 7, 96, 301, 1088}) {
      for (const DType dtype : kDtypes) {
        for (const std::int64_t M : {1, 5, 40}) {
          LinearCase c{.format = K % 32 == 0 ? "mxfp4" : "e2m1_row",
                       .rows = {M},
                       .N = M == 1 ? 130 : 50,
                       .K = K,
                       .dtype = dtype};
          c.norm = norm;
          c.norm_weight = turn % 3 != 0;
          c.norm_bias = turn % 2 == 0;
          c.norm_eps = turn % 5 == 4 ? 0.5f : 1e-6f;
          c.x_mean = turn % 4 == 1 ? 300 : 0;
          c.activation = kActivations[turn % std::size(kActivations)];
          c.bias = turn % 2 == 1;
          c.residual = turn % 3 == 0;
          c.int8_x = turn % 4 >= 2;
          c.layout = turn % 2 == 0 ? Layout::padded_rows : Layout::contiguous;
          c.seed = ++turn;
          expect_right(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The plain computation loses 13 bits of such rows; the kernel none.
TEST(LinearNorms, OfRowsWithALargeMean) {
  LinearCase c{.format = "e2m1_row", .rows = {5}, .N = 50, .K = 768};
  c.norm = Norm::layer_norm;
  c.x_mean = 1e4;
  const LinearLayer layer(c);
  kit::on_each_target([&] {
    const kit::Comparison verdict = layer.run();
    const double roundings = layer.terms() * 0x1p-22;
    EXPECT_LE(verdict.error, 4 * roundings) << verdict.worst;
    EXPECT_GT(verdict.plain_error, 100 * roundings);
  });
}

// A row that is constant has no direction: layer_norm gives its bias, and eps = 0 nothing at all, as by the definition.
TEST(LinearNorms, OfConstantRows) {
  LinearCase c{.format = "int8_row", .rows = {3}, .N = 20, .K = 40};
  c.norm = Norm::layer_norm;
  LinearLayer layer(c);
  for (std::int64_t i = 0; i < 2 * c.K; ++i) layer.x.set(i, i < c.K ? 12345.0 : 0.1);
  layer.x.set(2 * c.K, INFINITY);
  for (const float eps : {1e-5f, 0.0f}) {
    LinearOptions options = layer.options(), slow = options;
    options.norm_eps = slow.norm_eps = eps;
    slow.force = "reference";
    const HostTensor wanted = HostTensor::output(DType::f32, {3, 20});
    kit::call_linear(layer.x.view(), layer.packed.weights(), wanted.view(), slow);
    kit::on_each_target([&] {
      const HostTensor y = HostTensor::output(DType::f32, {3, 20});
      kit::call_linear(layer.x.view(), layer.packed.weights(), y.view(), options);
      for (std::int64_t i = 0; i < 60; ++i) {
        if (i >= 40) {
          ASSERT_TRUE(std::isnan(y.get(i)) && std::isnan(wanted.get(i))) << i;
        } else if (eps > 0) {
          ASSERT_NEAR(y.get(i), wanted.get(i), 1e-3) << i;
        }
      }
      if (eps == 0) {
        ASSERT_TRUE(std::isnan(y.get(0)) && std::isnan(wanted.get(0)));
      }
    });
  }
}

// A kernel that knows nothing of norms must not run without one.
TEST(LinearNorms, ACandidateWithoutNormsRefusesThem) {
  LinearKernel kernel = cpu::kLinear;
  kernel.extras = 0;
  LinearProblem problem;
  EXPECT_EQ(refusal(kernel, problem, Wish()), "");
  problem.norm.kind = Norm::rms_norm;
  EXPECT_EQ(refusal(kernel, problem, Wish()), "it has no norm in front of the product");
  EXPECT_EQ(refusal(cpu::kLinear, problem, Wish()), "");
}

// A row's bits do not depend on how many rows are staged, nor by whom.
TEST(LinearNorms, NormedRowsDoNotDependOnTheOthers) {
  const std::int64_t N = 50, K = 384, M = 133;
  for (const DType dtype : kDtypes) {
    for (const bool int8 : {false, true}) {
      LinearCase c{.format = "nvfp4", .rows = {M}, .N = N, .K = K, .dtype = dtype, .int8_x = int8};
      c.norm = Norm::rms_norm;
      const LinearLayer layer(c);
      LinearOptions options = layer.options();
      options.batch_invariant = true;
      const auto three = make_thread_pool(3);
      kit::on_each_target([&] {
        const HostTensor all = HostTensor::output(dtype, {M, N});
        kit::call_linear(layer.x.view(), layer.packed.weights(), all.view(), options, three.get());
        for (const std::int64_t m : {0, 1, 64, 127, 128, 132}) {
          TensorView row = layer.x.view();
          row.data = static_cast<std::byte*>(row.data) + m * K * static_cast<std::int64_t>(size_of(dtype));
          row.shape[0] = 1;
          const HostTensor y = HostTensor::output(dtype, {1, N});
          kit::call_linear(row, layer.packed.weights(), y.view(), options);
          for (std::int64_t n = 0; n < N; ++n) ASSERT_EQ(y.get(n), all.get(m * N + n)) << m << " " << n;
        }
      });
    }
  }
}

}  // namespace
}  // namespace heddle

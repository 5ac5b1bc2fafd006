// Linear layers by cuBLASLt on the GPU: forward over kept and decoded weights, W8A8, gradients. Needs cuBLASLt where
// the loader finds it: without it the tests say so and fail.
#include <gtest/gtest.h>

#include <cmath>

#include "core/check.h"
#include "gpu/device_matrix.h"
#include "gpu/device_weights.h"
#include "gpu/layer_on_gpu.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_gradients.h"
#include "kit/linear_layer.h"
#include "lowbit/fragments.h"

namespace heddle::kit {
namespace {

// A layer's tensors on the GPU.
struct DeviceLayer {
  DeviceLayer(const LinearLayer& given, bool kept, bool dense = false)
      : layer(given),
        weights(given, kept, dense),
        x(given.x),
        bias(given.bias),
        residual(given.residual),
        norm_weight(given.norm_weight),
        norm_bias(given.norm_bias),
        host_y(given.output()),
        y(host_y) {}

  LinearOptions options(const char* force) const {
    LinearOptions options = layer.options();
    if (options.bias.given()) options.bias = bias.view();
    if (options.residual.given()) options.residual = layer.given().in_place ? y.view() : residual.view();
    if (options.norm_weight.given()) options.norm_weight = norm_weight.view();
    if (options.norm_bias.given()) options.norm_bias = norm_bias.view();
    options.force = force;
    return options;
  }
  Comparison run(const char* force) {
    const LinearOptions given = options(force);
    const DeviceStream stream;
    const DeviceMemory scratch(linear_forward_workspace(x.view(), *weights, given), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {scratch.data(), scratch.bytes()};
    linear_forward(x.view(), *weights, y.view(), given, runtime);
    stream.synchronize();
    y.read(host_y);
    return layer.compare(host_y);
  }

  const LinearLayer& layer;
  DeviceWeights weights;
  DeviceTensor x, bias, residual, norm_weight, norm_bias;
  HostTensor host_y;
  DeviceTensor y;
};

constexpr Activation kActivations[] = {Activation::none,      Activation::relu, Activation::gelu_erf,
                                       Activation::gelu_tanh, Activation::silu, Activation::swiglu};

void check(const LinearCase& c, bool kept, const char* force = "cublaslt", bool dense = false) {
  SCOPED_TRACE(text(c.format, " in ", name_of(c.order), kept ? ", kept " : " ", c.rows[0], " x ", c.N, " x ", c.K, " ",
                    name_of(c.dtype), " ", name_of(c.activation), c.bias ? " bias" : "", c.residual ? " residual" : "",
                    " norm ", name_of(c.norm)));
  const LinearLayer layer(c);
  DeviceLayer gpu(layer, kept, dense);
  expect_right(layer, gpu.run(force));
}

TEST(GpuLinearCublasLt, EveryFormat) {
  for (const std::string& name : lowbit::format_names()) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      check({.format = name,
             .rows = {33},
             .N = 136,
             .K = 256,
             .dtype = dtype,
             .bias = true,
             .order = WeightOrder::matrix},
            false);
      if (dtype == DType::f16 || lowbit::is_e2m1(lowbit::format_named(name))) continue;
      check({.format = name,
             .rows = {33},
             .N = 136,
             .K = 256,
             .dtype = dtype,
             .activation = Activation::swiglu,
             .order = WeightOrder::fragments16},
            false);
    }
  }
  for (const WeightOrder order : {WeightOrder::matrix, WeightOrder::fragments16}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      check({.format = "nvfp4", .rows = {300}, .N = 200, .K = 288, .dtype = dtype, .order = order}, true);
    }
  }
  check({.format = "e2m1_row", .rows = {5}, .N = 70, .K = 129, .dtype = DType::bf16, .order = WeightOrder::matrix},
        false);
  check({.format = "int8_row", .rows = {1}, .N = 33, .K = 77, .dtype = DType::f16, .order = WeightOrder::matrix},
        false);
}

// Sums as long as a large model's.
TEST(GpuLinearCublasLt, LongSums) {
  for (const std::int64_t K : {8192, 28672}) {
    for (const std::int64_t rows : {16, 128}) {
      for (const bool kept : {false, true}) {
        check({.format = "nvfp4", .rows = {rows}, .N = 256, .K = K, .dtype = DType::bf16, .order = WeightOrder::matrix},
              kept);
      }
      for (const bool int8 : {true, false}) {
        check({.format = int8 ? "int8_row" : "fp8_row",
               .rows = {rows},
               .N = 256,
               .K = K,
               .dtype = DType::bf16,
               .int8_x = int8,
               .order = int8 ? WeightOrder::matrix : WeightOrder::matrix8},
              false, "cublaslt_w8a8");
      }
    }
  }
}

TEST(GpuLinearCublasLt, Epilogues) {
  for (const Activation activation : kActivations) {
    for (const bool kept : {false, true}) {
      LinearCase c{.format = "nvfp4",
                   .rows = {70},
                   .N = 140,
                   .K = 128,
                   .dtype = DType::bf16,
                   .activation = activation,
                   .bias = true,
                   .residual = true,
                   .order = WeightOrder::matrix};
      check(c, kept);
      c.in_place = true;
      c.dtype = DType::f16;
      check(c, kept);
      c.in_place = c.bias = c.residual = false;
      check(c, kept);
    }
  }
}

// Weights that were never packed; nothing is asked for by name.
TEST(GpuLinearCublasLt, Dense) {
  for (const Activation activation : kActivations) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      LinearCase c{.format = "nvfp4",
                   .rows = {70},
                   .N = 140,
                   .K = 128,
                   .dtype = dtype,
                   .activation = activation,
                   .bias = true,
                   .residual = true,
                   .order = WeightOrder::matrix};
      check(c, true, "", true);
      c.in_place = true;
      check(c, true, "", true);
    }
  }
}

TEST(GpuLinearCublasLt, NormInFront) {
  for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
    LinearCase c{.format = "nf4",
                 .rows = {40},
                 .N = 136,
                 .K = 256,
                 .dtype = DType::bf16,
                 .bias = true,
                 .norm = norm,
                 .x_mean = 2};
    c.order = WeightOrder::matrix;
    check(c, false);
    c.activation = Activation::silu;
    check(c, true);
  }
}

// More than one part of the rows and of the columns.
TEST(GpuLinearCublasLt, PartsOfSums) {
  for (const WeightOrder order : {WeightOrder::matrix, WeightOrder::fragments16}) {
    check({.format = "int4_g32",
           .rows = {2100},
           .N = 4360,
           .K = 32,
           .dtype = DType::bf16,
           .activation = Activation::gelu_erf,
           .bias = true,
           .residual = true,
           .order = order},
          false);
  }
  check({.format = "int8_row",
         .rows = {2100},
         .N = 4360,
         .K = 24,
         .dtype = DType::bf16,
         .bias = true,
         .int8_x = true,
         .order = WeightOrder::matrix},
        false, "cublaslt_w8a8");
}

TEST(GpuLinearCublasLt, W8A8) {
  for (const bool int8 : {true, false}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t rows : {1, 5, 16, 100, 300}) {
        LinearCase c{.format = int8 ? "int8_row" : "fp8_row", .rows = {rows}, .N = 200, .K = 328, .dtype = dtype};
        c.int8_x = int8;
        c.order = int8 ? WeightOrder::matrix : WeightOrder::matrix8;
        check(c, false, "cublaslt_w8a8");
        c.N = 90;
        c.bias = c.residual = true;
        for (const Activation activation : kActivations) {
          c.activation = activation;
          if (rows == 5 || rows == 100) check(c, false, "cublaslt_w8a8");
        }
      }
    }
  }
}

TEST(GpuLinearCublasLt, NonFiniteRowsStayRows) {
  for (const char* const force : {"cublaslt", "cublaslt_w8a8"}) {
    for (const Activation activation : {Activation::none, Activation::relu}) {
      LinearCase c{.format = "int8_row",
                   .rows = {20},
                   .N = 128,
                   .K = 256,
                   .dtype = DType::bf16,
                   .activation = activation,
                   .int8_x = std::string(force) == "cublaslt_w8a8",
                   .order = WeightOrder::matrix};
      LinearLayer layer(c);
      layer.x.set(3 * 256 + 17, NAN);
      DeviceLayer gpu(layer, false);
      gpu.run(force);
      const std::vector<double> y = gpu.host_y.values();
      for (std::int64_t m = 0; m < 20; ++m) {
        for (std::int64_t n = 0; n < 128; ++n) {
          ASSERT_EQ(std::isfinite(y[static_cast<std::size_t>(m * 128 + n)]), m != 3) << force << " " << m << ", " << n;
        }
      }
    }
  }
}

void check_gradients(const LinearCase& c, bool kept, bool dense = false) {
  SCOPED_TRACE(text(c.format, " in ", name_of(c.order),
                    dense  ? ", dense "
                    : kept ? ", kept "
                           : " ",
                    c.rows[0], " x ", c.N, " x ", c.K, " ", name_of(c.dtype), " ", name_of(c.activation)));
  const LinearGradientLayer gradients(c);
  EXPECT_EQ(gradients.blind_spots("xb"), "");
  DeviceLayer gpu(gradients.layer, kept, dense);
  const DeviceTensor dy(gradients.dy);
  HostTensor dx = gradients.output('x'), dbias = gradients.output('b');
  const DeviceTensor dx_there(dx), dbias_there(dbias);
  LinearGradients to;
  to.dx = dx_there.view();
  to.dbias = dbias_there.view();
  LinearOptions options = gpu.options("cublaslt");
  options.residual = {};
  const TensorView x = c.activation == Activation::none ? TensorView() : gpu.x.view();
  const DeviceStream stream;
  const DeviceMemory scratch(linear_backward_workspace(dy.view(), x, *gpu.weights, to, options), 0xFF);
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  linear_backward(dy.view(), x, *gpu.weights, to, options, runtime);
  stream.synchronize();
  dx_there.read(dx);
  dbias_there.read(dbias);
  for (const auto& [letter, found] : {std::pair{'x', &dx}, std::pair{'b', &dbias}}) {
    const Comparison result = gradients.compare(letter, *found);
    EXPECT_TRUE(result.passed) << result.worst;
  }
}

TEST(GpuLinearCublasLt, Gradients) {
  for (const Activation activation : kActivations) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const WeightOrder order : {WeightOrder::matrix, WeightOrder::fragments16}) {
        const LinearCase c{.format = "nvfp4",
                           .rows = {70},
                           .N = 140,
                           .K = 192,
                           .dtype = dtype,
                           .activation = activation,
                           .bias = true,
                           .order = order};
        check_gradients(c, false);
        check_gradients(c, true);
        check_gradients(c, true, /*dense=*/true);
      }
    }
  }
  for (const std::string& name : lowbit::format_names()) {
    for (const WeightOrder order : {WeightOrder::matrix, WeightOrder::fragments16}) {
      LinearCase c{
          .format = name, .rows = {3, 11}, .N = 72, .K = 256, .dtype = DType::bf16, .bias = true, .order = order};
      check_gradients(c, false);
      c.activation = Activation::swiglu;
      if (order == WeightOrder::fragments16) check_gradients(c, false);
    }
  }
  // In e4m3 products x is rounded, which gradients do not see; W is what they multiply.
  for (const WeightOrder order : {WeightOrder::fragments16, WeightOrder::fragments8}) {
    for (const char* const format : {"nvfp4", "mxfp4"}) {
      check_gradients({.format = format, .rows = {33}, .N = 200, .K = 320, .dtype = DType::bf16, .order = order},
                      false);
    }
  }
}

TEST(GpuLinearCublasLt, NothingToDo) {
  for (const std::int64_t rows : {0, 3}) {
    LinearCase c{.rows = {rows}, .N = rows == 0 ? 64 : 0, .K = 64, .dtype = DType::bf16, .order = WeightOrder::matrix};
    const LinearLayer layer(c);
    DeviceLayer(layer, false).run("cublaslt");
    check_gradients(c, false);
  }
}

// Rows of y that fill no pieces of 16 bytes: queries, which have no y, answer for the candidate that runs.
TEST(GpuLinearCublasLt, QueriesKnowTheWidth) {
  for (const char* const format : {"nvfp4", "int4_g128", "nf4", "int8_row"}) {
    for (const Activation activation : {Activation::none, Activation::swiglu}) {
      SCOPED_TRACE(text(format, " ", name_of(activation)));
      const LinearLayer layer({.format = format,
                               .rows = {5},
                               .N = activation == Activation::swiglu ? 20 : 10,
                               .K = 256,
                               .dtype = DType::bf16,
                               .activation = activation,
                               .order = WeightOrder::fragments16});
      DeviceLayer gpu(layer, false);
      std::string chosen;
      for (const Candidate& c : explain_linear(gpu.x.view(), *gpu.weights, gpu.options(""))) {
        if (c.chosen) chosen = c.name;
        if (c.name == "sm80_linear") {
          EXPECT_EQ(c.reason, "y's rows must have a multiple of 8 elements; found 10");
        }
      }
      if (std::string(format) == "nvfp4") {
        EXPECT_EQ(chosen, "");
        EXPECT_THROW(linear_forward_workspace(gpu.x.view(), *gpu.weights, gpu.options("")), Error);
        continue;
      }
      EXPECT_EQ(chosen, "cublaslt");
      expect_right(layer, gpu.run(""));
    }
  }
}

// Nothing is read, so that any memory serves.
TEST(GpuLinearCublasLt, ManyRowsTakeTheCopy) {
  const std::int64_t N = 8192, K = 8192;
  const DeviceMemory memory(256);
  PackedWeights weights = packed_storage(lowbit::format_named("nvfp4"), N, K, false, WeightOrder::fragments16);
  weights.data.data = memory.data();
  weights.device = weights.data.device = Device::cuda;
  weights.kept = TensorView(memory.data(), DType::bf16, {N, K});
  weights.kept.device = Device::cuda;
  const auto chosen = [&](std::int64_t rows, Activation activation) {
    TensorView x(memory.data(), DType::bf16, {rows, K});
    x.device = Device::cuda;
    std::string name;
    LinearOptions options;
    options.activation = activation;
    for (const Candidate& c : explain_linear(x, weights, options)) {
      EXPECT_EQ(c.of_16bit > 0.0, c.supported) << c.name;
      if (c.chosen) name = c.name;
    }
    return name;
  };
  EXPECT_NE(chosen(1, Activation::none), "cublaslt");
  EXPECT_EQ(chosen(32, Activation::none), "sm90_w4a16");
  EXPECT_EQ(chosen(4096, Activation::gelu_tanh), "cublaslt");
  // The layer over the copy is what the others are compared with, whatever comes after the product or before.
  TensorView x(memory.data(), DType::bf16, {64, K});
  x.device = Device::cuda;
  LinearOptions options;
  for (const Norm norm : {Norm::none, Norm::rms_norm}) {
    options.norm = norm;
    for (const Activation activation : kActivations) {
      if (activation == Activation::swiglu) continue;  // these weights are not gated
      options.activation = activation;
      for (const Candidate& c : explain_linear(x, weights, options)) {
        EXPECT_TRUE(c.name != "cublaslt" || c.of_16bit == 1.0) << name_of(activation) << " " << c.of_16bit;
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit

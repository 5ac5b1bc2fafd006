// linear_forward on the GPU against the double-precision reference.
#include <gtest/gtest.h>

#include <cmath>

#include "core/check.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"

namespace heddle::kit {
namespace {

// A layer's tensors on the GPU. `poison` fills the workspace: what it held before must not matter.
class LayerOnGpu {
 public:
  explicit LayerOnGpu(const LinearLayer& layer)
      : y_(layer.output()),
        x(layer.x),
        bias(layer.bias),
        residual(layer.residual),
        norm_weight(layer.norm_weight),
        norm_bias(layer.norm_bias),
        y(y_),
        weights(layer.packed.weights()),
        memory_(static_cast<std::size_t>(weights.data.shape[0])),
        layer_(layer) {
    memory_.write(0, weights.data.data, memory_.bytes());
    weights.data.data = memory_.data();
    weights.device = weights.data.device = Device::cuda;
  }

  LinearOptions options(bool in_place = false) const {
    LinearOptions options = layer_.options();
    if (options.bias.given()) options.bias = bias.view();
    if (options.residual.given()) options.residual = in_place ? y.view() : residual.view();
    if (options.norm_weight.given()) options.norm_weight = norm_weight.view();
    if (options.norm_bias.given()) options.norm_bias = norm_bias.view();
    return options;
  }

  std::size_t workspace(const LinearOptions& options) const {
    return linear_forward_workspace(x.view(), weights, options);
  }
  void launch(const LinearOptions& options, const DeviceStream& stream, const DeviceMemory& scratch) const {
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {scratch.data(), scratch.bytes()};
    linear_forward(x.view(), weights, y.view(), options, runtime);
  }
  void run(const LinearOptions& options) {
    const DeviceStream stream;
    const DeviceMemory scratch(workspace(options), 0xFF);
    launch(options, stream, scratch);
    stream.synchronize();
    y.read(y_);
  }
  Comparison compare() const { return layer_.compare(y_); }
  std::vector<double> values() const { return y_.values(); }

 private:
  HostTensor y_;

 public:
  const DeviceTensor x, bias, residual, norm_weight, norm_bias;
  DeviceTensor y;
  PackedWeights weights;

 private:
  DeviceMemory memory_;
  const LinearLayer& layer_;
};

constexpr WeightOrder kOrders[] = {WeightOrder::fragments16, WeightOrder::fragments8};

void check(LinearCase c) {
  SCOPED_TRACE(text(c.format, " in ", name_of(c.order), " ", c.rows[0], " x ", c.N, " x ", c.K, " ", name_of(c.dtype),
                    " ", name_of(c.activation), c.bias ? " bias" : "", c.residual ? " residual" : ""));
  const LinearLayer layer(c);
  LayerOnGpu gpu(layer);
  gpu.run(gpu.options(c.in_place));
  const Comparison result = gpu.compare();
  EXPECT_TRUE(result.passed) << result.worst;
}

// Every tile, with rows and columns that fill it and that do not.
TEST(GpuLinear, MatchesReference) {
  for (const WeightOrder order : kOrders) {
    const char* const format = order == WeightOrder::fragments16 ? "nvfp4" : "mxfp4";
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t rows : {1, 8, 9, 16, 31, 64, 65, 128, 200, 300}) {
        check({.format = format, .rows = {rows}, .N = 200, .K = 288, .dtype = dtype, .order = order});
      }
      check({.format = format, .rows = {5}, .N = 64, .K = 4096, .dtype = dtype, .order = order});
      check({.format = format, .rows = {64}, .N = 1024, .K = 512, .dtype = dtype, .order = order});
      check({.format = "mxfp4", .rows = {40}, .N = 9000, .K = 256, .dtype = dtype, .order = order});  // shares of all
                                                                                                      // sizes
      check({.format = "e2m1_row", .rows = {17}, .N = 128, .K = 136, .dtype = dtype, .order = order});
      check({.format = "mxfp4", .rows = {40}, .N = 320, .K = 1056, .dtype = dtype, .order = order});
    }
  }
}

// Enough tiles for the largest ones.
TEST(GpuLinear, ManyTiles) {
  for (const WeightOrder order : kOrders) {
    check({.format = "mxfp4", .rows = {1000}, .N = 4088, .K = 160, .dtype = DType::bf16, .order = order});
  }
}

TEST(GpuLinear, Epilogues) {
  for (const WeightOrder order : kOrders) {
    const char* const format = order == WeightOrder::fragments16 ? "nvfp4" : "mxfp4";
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                        Activation::silu, Activation::swiglu}) {
      for (const std::int64_t rows : {3, 33, 140}) {
        LinearCase c{.format = format,
                     .rows = {rows},
                     .N = 336,
                     .K = 256,
                     .dtype = DType::bf16,
                     .activation = activation,
                     .bias = true,
                     .residual = true,
                     .order = order};
        check(c);
        c.in_place = true;
        c.dtype = DType::f16;
        check(c);
      }
    }
  }
}

// Columns that a unit of four blocks lacks, where shared memory still holds infinities that a call before has left.
TEST(GpuLinear, MissingColumnsMeetNothing) {
  for (const WeightOrder order : kOrders) {
    LinearLayer spoiler({.format = "mxfp4", .rows = {40}, .N = 9000, .K = 512, .dtype = DType::f16, .order = order});
    for (std::int64_t i = 0; i < spoiler.x.elements(); ++i) spoiler.x.set(i, i % 2 == 0 ? INFINITY : NAN);
    LayerOnGpu gpu(spoiler);
    gpu.run(gpu.options());
    for (const std::int64_t rows : {1, 12, 30, 64, 100}) {
      check({.format = "mxfp4", .rows = {rows}, .N = 264, .K = 64, .dtype = DType::f16, .order = order});
      check({.format = "mxfp4", .rows = {rows}, .N = 264, .K = 320, .dtype = DType::f16, .order = order});
    }
  }
}

TEST(GpuLinear, NormInFront) {
  for (const WeightOrder order : kOrders) {
    for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        for (const std::int64_t rows : {1, 20, 130}) {
          LinearCase c{.format = "mxfp4",
                       .rows = {rows},
                       .N = 136,
                       .K = 288,
                       .dtype = dtype,
                       .bias = true,
                       .norm = norm,
                       .x_mean = 2};
          c.order = order;
          check(c);
          c.norm_weight = c.norm_bias = false;
          check(c);
        }
      }
    }
  }
}

// Partial sums of all CTAs that share a tile are added in one order: calls repeat to the bit, in a graph too, whose
// replays find the marks of the one before gone.
TEST(GpuLinear, RepeatsToTheBit) {
  for (const WeightOrder order : kOrders) {
    for (const std::int64_t rows : {4, 16, 32, 64, 128}) {
      const LinearLayer layer(
          {.format = "mxfp4", .rows = {rows}, .N = 512, .K = 4096, .dtype = DType::bf16, .order = order});
      LayerOnGpu gpu(layer);
      const LinearOptions options = gpu.options();
      gpu.run(options);
      EXPECT_TRUE(gpu.compare().passed) << gpu.compare().worst;
      const std::vector<double> first = gpu.values();
      const DeviceStream stream;
      const DeviceMemory scratch(gpu.workspace(options), 0xFF);
      const DeviceGraph graph(stream, [&] {
        for (int i = 0; i < 4; ++i) gpu.launch(options, stream, scratch);
      });
      for (int i = 0; i < 25; ++i) graph.replay(stream);
      stream.synchronize();
      HostTensor y = layer.output();
      gpu.y.read(y);
      EXPECT_EQ(y.values(), first) << rows << " rows in " << name_of(order);
    }
  }
}

// With batch_invariant a row's bits do not depend on how many others there are.
TEST(GpuLinear, BatchInvariant) {
  for (const WeightOrder order : kOrders) {
    const LinearCase c{.format = "mxfp4", .rows = {150}, .N = 192, .K = 2048, .dtype = DType::bf16, .order = order};
    const LinearLayer layer(c);
    LayerOnGpu gpu(layer);
    LinearOptions options = gpu.options();
    options.batch_invariant = true;
    gpu.run(options);
    EXPECT_TRUE(gpu.compare().passed) << gpu.compare().worst;
    const std::vector<double> all = gpu.values();
    for (const std::int64_t rows : {1, 7, 64, 100}) {
      TensorView x = gpu.x.view(), y = gpu.y.view();
      x.shape[0] = y.shape[0] = rows;
      HostTensor found = layer.output();
      DeviceTensor there(found);
      TensorView to = there.view();
      to.shape[0] = rows;
      const DeviceStream stream;
      Runtime runtime;
      runtime.stream = stream.get();
      const DeviceMemory scratch(linear_forward_workspace(x, gpu.weights, options), 0xFF);
      runtime.workspace = {scratch.data(), scratch.bytes()};
      linear_forward(x, gpu.weights, to, options, runtime);
      stream.synchronize();
      there.read(found);
      const std::vector<double> some = found.values();
      for (std::int64_t i = 0; i < rows * c.N; ++i) {
        ASSERT_EQ(some[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i)])
            << "row " << i / c.N << " of " << rows;
      }
    }
  }
}

TEST(GpuLinear, NonFiniteRowsStayRows) {
  for (const WeightOrder order : kOrders) {
    LinearLayer layer({.format = "mxfp4", .rows = {20}, .N = 128, .K = 256, .dtype = DType::bf16, .order = order});
    layer.x.set(3 * 256 + 17, NAN);
    layer.x.set(11 * 256 + 200, INFINITY);
    LayerOnGpu gpu(layer);
    gpu.run(gpu.options());
    const std::vector<double> y = gpu.values();
    for (std::int64_t m = 0; m < 20; ++m) {
      for (std::int64_t n = 0; n < 128; ++n) {
        EXPECT_EQ(std::isfinite(y[static_cast<std::size_t>(m * 128 + n)]), m != 3 && m != 11) << m << ", " << n;
      }
    }
  }
}

TEST(GpuLinear, NothingToDo) {
  LinearLayer layer({.rows = {0}, .N = 64, .K = 64, .dtype = DType::bf16, .order = WeightOrder::fragments16});
  LayerOnGpu gpu(layer);
  gpu.run(gpu.options());
}

TEST(GpuLinear, Refusals) {
  const auto refusal = [](const LinearCase& c, void (*bend)(TensorView&, PackedWeights&)) {
    const LinearLayer layer(c);
    const LayerOnGpu gpu(layer);
    TensorView x = gpu.x.view();
    PackedWeights weights = gpu.weights;
    bend(x, weights);
    try {
      linear_forward_workspace(x, weights);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  const LinearCase c{.rows = {4}, .N = 64, .K = 64, .dtype = DType::bf16, .order = WeightOrder::fragments16};
  EXPECT_NE(refusal(c, [](TensorView& x, PackedWeights&) { x.device = Device::cpu; }).find("another device"),
            std::string::npos);
  EXPECT_NE(refusal(c, [](TensorView& x, PackedWeights&) { x.stride[0] = 68; }).find("multiples of 16 bytes"),
            std::string::npos);
  EXPECT_NE(refusal(c, [](TensorView& x, PackedWeights&) { x.dtype = DType::f32; }).find("float16 or bfloat16"),
            std::string::npos);
  EXPECT_NE(refusal(c, [](TensorView&, PackedWeights& w) { w.data.shape[0] -= 16; }).find("weights.data is"),
            std::string::npos);
}

}  // namespace
}  // namespace heddle::kit

// linear_forward on the GPU against the double-precision reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dtypes.h"
#include "gpu/layer_on_gpu.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"

namespace heddle::kit {
namespace {

// Those that this GPU has.
std::vector<Way> ways() {
  std::vector<Way> ways;
  if (current_gpu().major == 9) {
    ways.push_back({"sm90_w4a16", "nvfp4"});
    ways.push_back({"sm90_w4a16", "mxfp4"});
    ways.push_back({"sm90_w4a16", "e2m1_row"});
    ways.push_back({"sm90_w4a8", "mxfp4", WeightOrder::fragments8});
    ways.push_back({"sm90_w4a8", "nvfp4", WeightOrder::fragments8});
    ways.push_back({"sm90_w4a8", "e2m1_row", WeightOrder::fragments8});
  }
  for (const char* format : {"nvfp4", "int4_g128", "int4_g32_zp", "nf4", "int8_row", "fp8_row"}) {
    ways.push_back({"sm80_linear", format});
  }
  return ways;
}

void check(const LinearCase& c, const Way& way) { check(way.filled(c), way.candidate); }

// Every tile, with rows and columns that fill it and that do not.
void match_reference(DType dtype) {
  for (const Way& way : ways()) {
    for (const std::int64_t rows : {1, 8, 9, 16, 31, 64, 65, 128, 200, 300}) {
      check({.rows = {rows}, .N = 200, .K = 288, .dtype = dtype}, way);
    }
    check({.rows = {5}, .N = 64, .K = 4096, .dtype = dtype}, way);
    check({.rows = {64}, .N = 1024, .K = 512, .dtype = dtype}, way);
    check({.rows = {40}, .N = 9000, .K = 256, .dtype = dtype}, way);  // shares of all sizes
    check({.rows = {40}, .N = 320, .K = 1056, .dtype = dtype}, way);
  }
}
TEST(GpuLinear, MatchesReferenceInBfloat16) { match_reference(DType::bf16); }
TEST(GpuLinear, MatchesReferenceInFloat16) { match_reference(DType::f16); }

// Few tiles and many steps, of which clusters of CTAs have a tile each; rows that end in any of a tile's slices.
TEST(GpuLinear, Clusters) {
  for (const Way& way : ways()) {
    for (const std::int64_t rows : {6, 12, 30, 60, 100, 140, 250}) {
      check({.rows = {rows}, .N = 200, .K = 1152, .dtype = DType::bf16, .bias = true}, way);
    }
    check({.rows = {60}, .N = 1000, .K = 1152, .dtype = DType::f16}, way);
  }
}

// Columns that fill neither a block nor a step, where the format allows them, groups of every size, and zero points far
// from the codes.
TEST(GpuLinear, EveryFormat) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t rows : {7, 50}) {
      for (const char* format : {"nvfp4", "mxfp4", "int4_g32", "int4_g64", "int4_g128", "int4_g32_zp", "int4_g64_zp",
                                 "int4_g128_zp", "nf4", "nf4_b32", "nf4_b128", "nf4_b512", "fp4_bnb", "fp4_bnb_b256"}) {
        const std::int64_t group = std::max<std::int64_t>(lowbit::format_named(format).group, 32);
        LinearCase c{.format = format, .rows = {rows}, .N = 136, .K = 3 * group, .dtype = dtype};
        c.order = WeightOrder::fragments16;
        check(c, "sm80_linear");
        if (!lowbit::format_named(format).zero_points) continue;
        c.more_zero = 100;
        check(c, "sm80_linear");
      }
      for (const char* format : {"e2m1_row", "int8_row", "fp8_row"}) {
        for (const std::int64_t K : {8, 72, 136, 200}) {
          LinearCase c{.format = format, .rows = {rows}, .N = 72, .K = K, .dtype = dtype};
          c.order = WeightOrder::fragments16;
          check(c, "sm80_linear");
          if (current_gpu().major != 9 || std::string(format) != "e2m1_row") continue;
          check(c, "sm90_w4a16");
          c.order = WeightOrder::fragments8;
          check(c, "sm90_w4a8");
        }
      }
    }
  }
}

// Scales of a row that lie further apart than order fragments8 has binades, so that weights are rounded, and, in 16
// bits without rounding, further than float16 has.
TEST(GpuLinear, ScalesFarApart) {
  std::vector<Way> all = {{"sm80_linear", "mxfp4"}, {"sm80_gemv", "mxfp4"}};
  for (const Way& way : ways()) {
    if (std::string(way.format) == "mxfp4") all.push_back(way);
  }
  for (const Way& way : all) {
    for (const std::int64_t rows : {1, 5, 130}) {
      if (rows > 8 && std::string(way.candidate) == "sm80_gemv") continue;
      LinearCase c{.rows = {rows}, .N = 136, .K = 320, .dtype = DType::bf16, .raised = 13};
      check(c, way);
      c.dtype = DType::f16;
      check(c, way);
      if (way.order == WeightOrder::fragments8) continue;  // where x would be zero besides
      c.dtype = DType::bf16;
      c.raised = 24;
      check(c, way);
    }
  }
}

// Enough tiles for the largest ones.
TEST(GpuLinear, ManyTiles) {
  for (const Way& way : ways()) {
    const std::string format = way.format;
    if (format == "mxfp4" || format == "int8_row" || way.order == WeightOrder::fragments8) {
      check({.rows = {1000}, .N = 4088, .K = 160, .dtype = DType::bf16}, way);
    }
  }
}

TEST(GpuLinear, Epilogues) {
  for (const Way& way : ways()) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                        Activation::silu, Activation::swiglu}) {
      for (const std::int64_t rows : {3, 33, 140}) {
        LinearCase c{.rows = {rows},
                     .N = 336,
                     .K = 256,
                     .dtype = DType::bf16,
                     .activation = activation,
                     .bias = true,
                     .residual = true};
        check(c, way);
        c.in_place = true;
        c.dtype = DType::f16;
        check(c, way);
      }
    }
  }
}

// Rows of x and y that lie apart, between what must be neither read nor written.
TEST(GpuLinear, RowsApart) {
  constexpr std::int64_t kRows = 21, kGap = 24;
  for (const Way& way : ways()) {
    const LinearLayer layer(way.filled({.rows = {kRows}, .N = 72, .K = 160, .dtype = DType::bf16}));
    const LayerOnGpu gpu(layer, way.candidate);
    const std::int64_t K = layer.given().K, N = layer.given().N;
    const DeviceMemory wide_x(static_cast<std::size_t>(kRows * (K + kGap)) * 2, 0xFF);  // NaN
    const DeviceMemory wide_y(static_cast<std::size_t>(kRows * (N + kGap)) * 2, 0xA5);
    TensorView x = gpu.x.view(), y = gpu.y.view();
    std::vector<std::uint16_t> row(static_cast<std::size_t>(K));
    DeviceMemory& to = const_cast<DeviceMemory&>(wide_x);
    for (std::int64_t m = 0; m < kRows; ++m) {
      for (std::int64_t k = 0; k < K; ++k) {
        row[static_cast<std::size_t>(k)] = f32_to_bf16(static_cast<float>(layer.x.get(m * K + k)));
      }
      to.write(static_cast<std::size_t>(m * (K + kGap)) * 2, row.data(), row.size() * 2);
    }
    x.data = wide_x.data();
    x.stride[0] = K + kGap;
    y.data = wide_y.data();
    y.stride[0] = N + kGap;
    const LinearOptions options = gpu.options();
    const DeviceStream stream;
    const DeviceMemory scratch(linear_forward_workspace(x, gpu.weights, options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {scratch.data(), scratch.bytes()};
    linear_forward(x, gpu.weights, y, options, runtime);
    stream.synchronize();
    HostTensor found = layer.output();
    std::vector<std::uint16_t> all(static_cast<std::size_t>(kRows * (N + kGap)));
    wide_y.read(0, all.data(), all.size() * 2);
    for (std::int64_t m = 0; m < kRows; ++m) {
      for (std::int64_t n = 0; n < N + kGap; ++n) {
        const std::uint16_t bits = all[static_cast<std::size_t>(m * (N + kGap) + n)];
        if (n < N) {
          found.set(m * N + n, bf16_to_f32(bits));
        } else {
          ASSERT_EQ(bits, 0xA5A5) << way.candidate << ": behind row " << m;
        }
      }
    }
    SCOPED_TRACE(text(way.candidate, " ", way.format));
    expect_right(layer, layer.compare(found));
  }
}

// Columns that a unit of four blocks lacks, where shared memory still holds infinities that a call before has left.
TEST(GpuLinear, MissingColumnsMeetNothing) {
  for (const Way& way : ways()) {
    LinearLayer spoiler(way.filled({.rows = {40}, .N = 9000, .K = 512, .dtype = DType::f16}));
    for (std::int64_t i = 0; i < spoiler.x.elements(); ++i) spoiler.x.set(i, i % 2 == 0 ? INFINITY : NAN);
    LayerOnGpu gpu(spoiler, way.candidate);
    gpu.run(gpu.options());
    for (const std::int64_t rows : {1, 12, 30, 64, 100}) {
      check({.rows = {rows}, .N = 264, .K = 64, .dtype = DType::f16}, way);
      check({.rows = {rows}, .N = 264, .K = 320, .dtype = DType::f16}, way);
    }
  }
}

TEST(GpuLinear, NormInFront) {
  for (const Way& way : ways()) {
    for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        for (const std::int64_t rows : {1, 20, 130}) {
          LinearCase c{.rows = {rows}, .N = 136, .K = 288, .dtype = dtype, .bias = true, .norm = norm, .x_mean = 2};
          check(c, way);
          c.norm_weight = c.norm_bias = false;
          check(c, way);
        }
      }
    }
  }
}

// Partial sums of all CTAs that share a tile are added in one order: calls repeat to the bit, in a graph too, whose
// replays find the marks of the one before gone.
TEST(GpuLinear, RepeatsToTheBit) {
  for (const Way& way : ways()) {
    for (const std::int64_t rows : {4, 16, 32, 64, 128}) {
      const LinearLayer layer(way.filled({.rows = {rows}, .N = 512, .K = 4096, .dtype = DType::bf16}));
      LayerOnGpu gpu(layer, way.candidate);
      const LinearOptions options = gpu.options();
      gpu.run(options);
      expect_right(layer, gpu.compare());
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
      EXPECT_EQ(y.values(), first) << rows << " rows of " << way.format << " in " << way.candidate;
    }
  }
}

// With batch_invariant a row's bits do not depend on how many others there are.
TEST(GpuLinear, BatchInvariant) {
  for (const Way& way : ways()) {
    const LinearCase c = way.filled({.rows = {150}, .N = 192, .K = 2048, .dtype = DType::bf16});
    const LinearLayer layer(c);
    LayerOnGpu gpu(layer, way.candidate);
    LinearOptions options = gpu.options();
    options.batch_invariant = true;
    gpu.run(options);
    expect_right(layer, gpu.compare());
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

// relu makes 0 of -infinity, and of nothing else that is not finite. Rows that are rounded to 8 bits become NaN.
TEST(GpuLinear, NonFiniteRowsStayRows) {
  constexpr std::int64_t kNaN = 3, kInfinite = 11;
  for (const Way& way : ways()) {
    for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                        Activation::silu, Activation::swiglu}) {
      SCOPED_TRACE(text(way.candidate, ": ", way.format, " ", name_of(activation)));
      LinearLayer layer(way.filled({.rows = {20}, .N = 128, .K = 256, .dtype = DType::bf16, .activation = activation}));
      layer.x.set(kNaN * 256 + 17, NAN);
      layer.x.set(kInfinite * 256 + 200, INFINITY);
      LayerOnGpu gpu(layer, way.candidate);
      gpu.run(gpu.options());
      const std::vector<double> y = gpu.values();
      const auto outputs = static_cast<std::int64_t>(y.size()) / 20;
      for (std::int64_t m = 0; m < 20; ++m) {
        for (std::int64_t n = 0; n < outputs; ++n) {
          const double found = y[static_cast<std::size_t>(m * outputs + n)];
          if (m == kNaN || (m == kInfinite && way.order == WeightOrder::fragments8)) {
            EXPECT_TRUE(std::isnan(found)) << found << " at " << m << ", " << n;
          } else if (m == kInfinite) {
            EXPECT_TRUE(!std::isfinite(found) || (activation == Activation::relu && found == 0))
                << found << " at " << m << ", " << n;
          } else {
            EXPECT_TRUE(std::isfinite(found)) << found << " at " << m << ", " << n;
          }
        }
      }
    }
  }
}

// Sums of a group and a scale that float16 does not hold, of which others take most away: both are in float32.
TEST(GpuLinear, LargeScalesDoNotOverflow) {
  QuantizedMemory matrix(lowbit::format_named("int4_g128"), 64, 256);
  auto* const codes = static_cast<std::uint8_t*>(matrix.matrix().codes.data);
  auto* const scales = static_cast<std::uint16_t*>(matrix.matrix().scales.data);
  for (std::int64_t n = 0; n < 64; ++n) {  // 7 in the first group, -7 in the second, once -6
    for (std::int64_t k = 0; k < 128; ++k) codes[n * 128 + k] = k < 64 ? 0xFF : k < 127 ? 0x11 : 0x21;
    scales[2 * n] = scales[2 * n + 1] = f32_to_f16(30000.0f);
  }
  const PackedMemory packed(matrix.matrix(), false, WeightOrder::fragments16);
  HostTensor x = HostTensor::input(DType::f16, {3, 256}), y = HostTensor::output(DType::f16, {3, 64});
  for (std::int64_t i = 0; i < x.elements(); ++i) x.set(i, 1.0);
  const DeviceTensor there(x);
  const DeviceTensor out(y);
  DeviceMemory data(static_cast<std::size_t>(packed.weights().data.shape[0]));
  data.write(0, packed.weights().data.data, data.bytes());
  PackedWeights weights = packed.weights();
  weights.data.data = data.data();
  weights.device = weights.data.device = Device::cuda;
  const DeviceStream stream;
  const DeviceMemory scratch(linear_forward_workspace(there.view(), weights), 0xFF);
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  linear_forward(there.view(), weights, out.view(), {}, runtime);
  stream.synchronize();
  out.read(y);
  for (const double value : y.values()) EXPECT_EQ(value, 30000.0);
}

// Weights that float16 does not hold, most infinite in it or all zero, and a y that it does hold: the plain computation
// would be nothing to go by.
TEST(GpuLinear, WeightsBeyondFloat16) {
  std::vector<Way> all = {{"sm80_linear", "mxfp4"}, {"sm80_linear", "e2m1_row"}};
  for (const char* format : {"nvfp4", "mxfp4", "e2m1_row"}) all.push_back({"sm80_gemv", format});
  for (const Way& way : ways()) {
    if (lowbit::format_named(way.format).scale != lowbit::ScaleType::f16) all.push_back(way);
  }
  for (const Way& way : all) {
    for (const int raised : {17, -26}) {
      for (const std::int64_t rows : {1, 7, 40}) {
        if (rows > 8 && std::string(way.candidate) == "sm80_gemv") continue;
        SCOPED_TRACE(text(way.candidate, ": ", way.format, ", ", rows, " rows, raised by ", raised));
        LinearCase c{.rows = {rows}, .N = 136, .K = 256, .dtype = DType::bf16, .all_raised = raised};
        check(c, way);
        c.dtype = DType::f16;
        const LinearLayer layer(way.filled(c));
        LayerOnGpu gpu(layer, way.candidate);
        gpu.run(gpu.options());
        const std::vector<double> y = gpu.values();
        for (std::size_t i = 0; i < y.size(); ++i) {
          const double exact = layer.exact()[i], bound = std::abs(exact) * 0x1p-10 + layer.terms() * 0x1p-11;
          ASSERT_TRUE(std::abs(y[i] - exact) <= bound) << i << ": " << y[i] << " for " << exact;
        }
      }
    }
  }
}

TEST(GpuLinear, NothingToDo) {
  LinearLayer layer({.rows = {0}, .N = 64, .K = 64, .dtype = DType::bf16, .order = WeightOrder::fragments16});
  LayerOnGpu gpu(layer);
  gpu.run(gpu.options());
}

}  // namespace
}  // namespace heddle::kit

// Quantisation and back on the GPU: the bits of the reference, whatever the weights.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "core/check.h"
#include "gpu/device_matrix.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle::kit {
namespace {

using lowbit::Format;
using lowbit::format_named;
using lowbit::QuantizeOptions;
using lowbit::ScaleRule;

// on_gpu: the same options, with tensors on the GPU.
std::string difference(const HostTensor& weights, const QuantizeOptions& options, const QuantizeOptions& on_gpu,
                       const Format& format) {
  const QuantizedByReference expected(weights, options, format);
  const DeviceTensor there(weights);
  const DeviceMatrix found(format, weights.view().shape[0], weights.view().shape[1]);
  quantize_on_gpu(there.view(), on_gpu, found.matrix());
  if (std::string bytes = found.read().difference(expected.memory); !bytes.empty()) return bytes;
  const std::int64_t K = weights.view().shape[1];
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Layout layout = dtype == DType::bf16 ? Layout::padded_rows : Layout::contiguous;
    const HostTensor out = dequantize_on_gpu(found.matrix(), dtype, layout);
    if (!out.damage().empty()) return out.damage();
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      const double wanted = rounded(expected.values[static_cast<std::size_t>(i)], dtype);
      if (out.get(i) == wanted) continue;
      return text(name_of(dtype), " [", i / K, ", ", i % K, "] decodes to ", out.get(i), " for ", wanted);
    }
  }
  return {};
}
std::string difference(const HostTensor& weights, const QuantizeOptions& options, const Format& format) {
  return difference(weights, options, options, format);
}

std::vector<std::string> all_formats() {
  std::vector<std::string> names = lowbit::format_names();
  names.insert(names.end(), {"nf4_b32", "nf4_b512", "nf4_b4096", "fp4_bnb_b256"});
  return names;
}

// Odd sizes for rows, several groups else.
std::vector<std::int64_t> widths(const Format& format) {
  if (format.group == 0) return {1, 7, 33, 1056, 4096 + 21};
  if (format.group > 512) return {4096, 8192};
  return {format.group, 3 * format.group, 4096 + 512};
}

TEST(GpuLowbit, BitsOfTheReference) {
  std::uint32_t seed = 0;
  for (const std::string& name : all_formats()) {
    const Format format = format_named(name);
    for (const ScaleRule rule : rules_of(format)) {
      for (const Draw draw : {Draw::gaussian, Draw::ties, Draw::signs, Draw::outliers, Draw::tiny, Draw::huge}) {
        for (const std::int64_t K : widths(format)) {
          for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            if (dtype == DType::f16 && K == widths(format).back()) continue;
            SCOPED_TRACE(text(name, " ", lowbit::name_of(rule), " draw ", static_cast<int>(draw), " K ", K, " ",
                              name_of(dtype)));
            const Layout layout = seed % 4 == 1   ? Layout::strided_dim
                                  : seed % 4 == 2 ? Layout::reversed
                                                  : Layout::contiguous;
            const HostTensor weights = draw_weights(draw, dtype, 3, K, format.element, ++seed, layout);
            ASSERT_EQ(difference(weights, {.rule = rule, .importance = {}}, format), "");
          }
        }
      }
    }
  }
}

// More groups than threads, rows from the last one up, and what a thread does when it comes round again.
TEST(GpuLowbit, ManyGroups) {
  for (const char* const name : {"nvfp4", "mxfp4", "nf4", "int4_g128_zp", "int4_g32", "fp8_row", "e2m1_row"}) {
    SCOPED_TRACE(name);
    const Format format = format_named(name);
    const std::int64_t N = 2503, K = 4480;
    const HostTensor weights = draw_weights(Draw::student, DType::bf16, N, K, format.element, 5);
    QuantizedMemory expected(format, N, K);
    lowbit::quantize(weights.view(), {}, expected.matrix());
    const DeviceTensor there(weights);
    const DeviceMatrix found(format, N, K);
    quantize_on_gpu(there.view(), {}, found.matrix());
    EXPECT_EQ(found.read().difference(expected), "");
    const HostTensor back = dequantize_on_gpu(found.matrix(), DType::bf16),
                     wanted = HostTensor::output(DType::bf16, {N, K});
    lowbit::dequantize(expected.matrix(), wanted.view());
    EXPECT_TRUE(back.same_bits(wanted));
  }
}

TEST(GpuLowbit, ImportanceCountsAsTheReferenceSays) {
  std::mt19937 random(5);
  for (const std::string& name : all_formats()) {
    const Format format = format_named(name);
    const std::int64_t K = widths(format).back();
    HostTensor importance = HostTensor::input(DType::f32, {K});
    for (std::int64_t k = 0; k < K; ++k) {
      importance.set(k, random() % 5 == 0 ? 0.0 : std::exp(std::normal_distribution<float>()(random)));
    }
    const DeviceTensor there(importance);
    for (const ScaleRule rule : rules_of(format)) {
      if (!lowbit::searches(rule)) continue;
      SCOPED_TRACE(name + " " + lowbit::name_of(rule));
      const HostTensor weights = draw_weights(Draw::student, DType::f32, 3, K, format.element, 9);
      ASSERT_EQ(difference(weights, {.rule = rule, .importance = importance.view()},
                           {.rule = rule, .importance = there.view()}, format),
                "");
    }
  }
}

TEST(GpuLowbit, AGlobalScaleMayBeShared) {
  const HostTensor weights = draw_weights(Draw::gaussian, DType::f32, 4, 64, lowbit::Element::e2m1, 3);
  for (const float shared : {0.01f, 1e-45f, 1e30f, 3e38f}) {
    for (const ScaleRule rule : rules_of(format_named("nvfp4"))) {
      SCOPED_TRACE(text(shared, " ", lowbit::name_of(rule)));
      EXPECT_EQ(difference(weights, {.rule = rule, .importance = {}, .global_scale = shared}, format_named("nvfp4")),
                "");
    }
  }
}

// Every byte that may stand in storage decodes as the reference says.
TEST(GpuLowbit, EveryCodeAndScaleDecodes) {
  for (const std::string& name : all_formats()) {
    SCOPED_TRACE(name);
    const Format format = format_named(name);
    const std::int64_t N = 256, K = std::max<std::int64_t>(format.group, 32);
    QuantizedMemory memory(format, N, K);
    std::mt19937 random(1);
    const lowbit::QuantizedMatrix& m = memory.matrix();
    auto* codes = static_cast<std::uint8_t*>(m.codes.data);
    for (std::int64_t i = 0; i < m.codes.elements(); ++i) codes[i] = static_cast<std::uint8_t>(i % 257);
    for (std::int64_t i = 0; i < m.scales.elements(); ++i) {
      if (size_of(m.scales.dtype) == 1) static_cast<std::uint8_t*>(m.scales.data)[i] = static_cast<std::uint8_t>(i);
      if (m.scales.dtype == DType::f16)
        static_cast<std::uint16_t*>(m.scales.data)[i] = static_cast<std::uint16_t>(random());
      if (m.scales.dtype == DType::f32) {
        static_cast<float*>(m.scales.data)[i] = std::ldexp(1.1f, static_cast<int>(i % 80) - 40);
      }
    }
    for (std::int64_t i = 0; i < m.zeros.elements(); ++i) {
      static_cast<std::uint8_t*>(m.zeros.data)[i] = static_cast<std::uint8_t>(i % 16);
    }
    if (format.global_scale) *static_cast<float*>(m.global_scale.data) = 0.37f;
    const lowbit::Matrix matrix = lowbit::checked_matrix(Check("test"), m, "matrix");
    const HostTensor out = dequantize_on_gpu(DeviceMatrix(m).matrix(), DType::f32);
    for (std::int64_t i = 0; i < N * K; ++i) {
      const float wanted = reference::dequantized(matrix, i / K, i % K);
      const auto found = static_cast<float>(out.get(i));
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(found)) << i;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(wanted)) << i;
      }
    }
  }
}

TEST(GpuLowbit, NothingIsAMatrixToo) {
  for (const std::string& name : all_formats()) {
    const Format format = format_named(name);
    const std::int64_t group = std::max<std::int64_t>(format.group, 1);
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{0, group}, {2, 0}, {0, 0}}) {
      const HostTensor weights = HostTensor::input(DType::f32, {N, K});
      QuantizedMemory expected(format, N, K);
      lowbit::quantize(weights.view(), {}, expected.matrix());
      const DeviceTensor there(weights);
      const DeviceMatrix found(format, N, K);
      quantize_on_gpu(there.view(), {}, found.matrix());
      EXPECT_EQ(found.read().difference(expected), "") << name << " " << N << " " << K;
      dequantize_on_gpu(found.matrix(), DType::f32);
    }
  }
}

TEST(GpuLowbit, WhatIsNotFiniteIsNamed) {
  const auto words = [](const char* name, std::int64_t at, double value, DType dtype) {
    HostTensor weights = draw_weights(Draw::gaussian, dtype, 5, 128, lowbit::Element::e2m1, 3);
    weights.set(at, value);
    if (at < 4 * 128) weights.set(4 * 128 + 1, value);  // a later one
    const DeviceTensor there(weights);
    const DeviceMatrix out(format_named(name), 5, 128);
    try {
      quantize_on_gpu(there.view(), {}, out.matrix());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("was accepted");
  };
  for (const char* const name : {"nvfp4", "mxfp4", "nf4", "int4_g32_zp", "int8_row"}) {
    EXPECT_NE(words(name, 2 * 128 + 5, NAN, DType::f32).find("weights[2, 5] is nan: weights must be finite"),
              std::string::npos);
    EXPECT_NE(words(name, 128, -INFINITY, DType::bf16).find("weights[1, 0] is -inf"), std::string::npos);
    EXPECT_NE(words(name, 639, INFINITY, DType::f16).find("weights[4, 127] is inf"), std::string::npos);
  }
  EXPECT_NE(words("int4_g32", 66, -5e5, DType::f32).find("weights[0, 66] is -500000: int4_g32 has float16 scales"),
            std::string::npos);
  EXPECT_EQ(words("nf4", 66, -5e5, DType::f32), "was accepted");
  HostTensor importance = HostTensor::input(DType::f32, {128});
  for (std::int64_t k = 0; k < 128; ++k) importance.set(k, k == 77 || k == 90 ? -1.0 : 1.0);
  const DeviceTensor weights(draw_weights(Draw::gaussian, DType::f32, 5, 128, lowbit::Element::e2m1, 3)),
      bad(importance);
  const DeviceMatrix out(format_named("nvfp4"), 5, 128);
  try {
    quantize_on_gpu(weights.view(), {.rule = ScaleRule::mse, .importance = bad.view()}, out.matrix());
    ADD_FAILURE() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("importance[77] is -1: it must be finite and at least 0"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace heddle::kit

// Packed weights as floats again, and the orders for cuBLASLt, which are packed here and read on a GPU.
#include <gtest/gtest.h>

#include <cmath>

#include "core/check.h"
#include "heddle/linear.h"
#include "kernels/candidates.h"
#include "kit/linear_layer.h"
#include "kit/lowbit_weights.h"
#include "lowbit/formats.h"
#include "lowbit/matrix_order.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle {
namespace {

using kit::Draw;
using kit::HostTensor;
using kit::PackedMemory;
using kit::QuantizedMemory;

TEST(UnpackWeights, GivesWhatDequantizeGives) {
  for (const std::string& name : lowbit::format_names()) {
    const lowbit::Format format = lowbit::format_named(name);
    for (const std::int64_t N : {1, 16, 37}) {
      const std::int64_t K = format.group == 0 ? 131 : 3 * format.group;
      const HostTensor weights = kit::draw_weights(Draw::student, DType::f32, N, K, format.element, 3);
      QuantizedMemory quantized(format, N, K);
      lowbit::quantize(weights.view(), {}, quantized.matrix());
      for (const WeightOrder order : {WeightOrder::rows16, WeightOrder::matrix, WeightOrder::matrix8}) {
        if (order == WeightOrder::matrix8 && name != "fp8_row") continue;
        const PackedMemory packed(quantized.matrix(), false, order);
        EXPECT_TRUE(packed.guards_intact());
        for (const DType dtype : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(text(name, " ", name_of(order), " ", N, " ", name_of(dtype)));
          const HostTensor out = HostTensor::output(dtype, {N, K}, kit::Layout::padded_rows);
          const HostTensor wanted = HostTensor::output(dtype, {N, K}, kit::Layout::padded_rows);
          unpack_weights(packed.weights(), out.view());
          lowbit::dequantize(quantized.matrix(), wanted.view());
          EXPECT_TRUE(out.same_bits(wanted));
        }
      }
    }
  }
}

// What a product in 8 bits reads beside the matrix is zero: rows up to sixteens, columns up to 16 bytes.
TEST(UnpackWeights, OrderMatrixIsFilledUpWithZeros) {
  const std::int64_t N = 21, K = 35;
  const lowbit::Format format = lowbit::format_named("int8_row");
  const HostTensor weights = kit::draw_weights(Draw::gaussian, DType::f32, N, K, format.element, 3);
  QuantizedMemory quantized(format, N, K);
  lowbit::quantize(weights.view(), {}, quantized.matrix());
  const PackedMemory packed(quantized.matrix(), false, WeightOrder::matrix);
  const lowbit::MatrixLayout layout = lowbit::matrix_layout(format, N, K);
  EXPECT_EQ(layout.rows, 32);
  EXPECT_EQ(layout.pitch, 48);
  EXPECT_EQ(layout.codes % 64, 0);
  const auto* data = static_cast<const std::int8_t*>(packed.weights().data.data) + layout.codes;
  for (std::int64_t n = 0; n < layout.rows; ++n) {
    for (std::int64_t k = 0; k < layout.pitch; ++k) {
      const auto* codes = static_cast<const std::int8_t*>(quantized.matrix().codes.data);
      ASSERT_EQ(data[n * layout.pitch + k], n < N && k < K ? codes[n * K + k] : 0) << n << ", " << k;
    }
  }
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const RuntimeError& error) {
    return error.what();
  }
  return "was accepted";
}
void expect(const std::string& found, const char* words) { EXPECT_NE(found.find(words), std::string::npos) << found; }

// What e4m3 products multiply: weights of mxfp4 and e2m1_row as they are, those of nvfp4 within 2^-4 of them where
// their group's scale is 2^-10 of the row's largest scale or more, and elsewhere within that 2^-10.
TEST(UnpackWeights, OfEightBitProducts) {
  for (const char* name : {"nvfp4", "mxfp4", "e2m1_row"}) {
    const lowbit::Format format = lowbit::format_named(name);
    for (const bool gated : {false, true}) {
      constexpr std::int64_t kRows = 74, kColumns = 288;
      HostTensor weights = kit::draw_weights(Draw::gaussian, DType::f32, kRows, kColumns, format.element, 11);
      // Groups of all sizes; mxfp4's stay within what it holds exactly.
      for (std::int64_t i = 0; i < weights.elements(); ++i) {
        weights.set(i,
                    std::ldexp(weights.get(i), -static_cast<int>(i / 32 % 9) * (std::string(name) == "nvfp4" ? 2 : 1)));
      }
      QuantizedMemory quantized(format, kRows, kColumns);
      lowbit::quantize(weights.view(), {}, quantized.matrix());
      const lowbit::Matrix matrix = lowbit::checked_matrix(Check("test"), quantized.matrix(), "matrix");
      const PackedMemory packed(quantized.matrix(), gated, WeightOrder::fragments8);
      EXPECT_TRUE(packed.guards_intact());
      const HostTensor out = HostTensor::output(DType::f32, {kRows, kColumns});
      unpack_weights(packed.weights(), out.view());
      bool rounded = false;
      for (std::int64_t n = 0; n < kRows; ++n) {
        double largest = 0;  // scale of the row
        const auto scale_of = [&](std::int64_t k) {
          return lowbit::load_scale(matrix.scales, matrix.format.scale, n * matrix.groups + k / matrix.group) *
                 static_cast<double>(matrix.global_scale != nullptr ? *matrix.global_scale : 1.0f);
        };
        for (std::int64_t k = 0; k < kColumns; ++k) largest = std::max(largest, scale_of(k));
        for (std::int64_t k = 0; k < kColumns; ++k) {
          const double expected = reference::dequantized(matrix, n, k), found = out.get(n * kColumns + k);
          double bound = 1e-7 * std::abs(expected);
          if (std::string(name) == "nvfp4") {
            bound = scale_of(k) >= std::ldexp(largest, -10) ? std::abs(expected) / 16 : std::ldexp(largest, -10);
          }
          ASSERT_LE(std::abs(found - expected), bound) << name << ": " << n << ", " << k;
          rounded = rounded || found != expected;
        }
      }
      EXPECT_EQ(rounded, std::string(name) == "nvfp4");
    }
  }
}

TEST(UnpackWeights, Refusals) {
  const kit::LinearLayer layer({.N = 32, .K = 64});
  const HostTensor out = HostTensor::output(DType::f32, {32, 64}), small = HostTensor::output(DType::f32, {32, 32});
  expect(refusal([&] { unpack_weights(layer.packed.weights(), small.view()); }),
         "out is [32, 32]: it must be [32, 64]");
  expect(refusal([&] {
           TensorView there = out.view();
           there.device = Device::cuda;
           unpack_weights(layer.packed.weights(), there);
         }),
         "out is on a GPU");
  const PackedMemory fragments(layer.quantized.matrix(), false, WeightOrder::fragments16);
  expect(
      refusal([&] { unpack_weights(fragments.weights(), out.view()); }),
      "weights are in order fragments16 on the CPU: there, orders rows16, fragments8, matrix and matrix8 are unpacked");
  expect(refusal([&] { packed_storage(lowbit::format_named("nf4"), 32, 64, false, WeightOrder::matrix8); }),
         "format is nf4: order matrix8 has fp8_row");
  EXPECT_EQ(weight_order_named("matrix"), WeightOrder::matrix);
  EXPECT_STREQ(name_of(WeightOrder::matrix8), "matrix8");
}

TEST(UnpackWeights, DenseWeightsAreChecked) {
  const HostTensor bf16 = HostTensor::input(DType::bf16, {6, 16}), f32 = HostTensor::input(DType::f32, {6, 16});
  TensorView w = bf16.view(), wide = f32.view();
  w.device = wide.device = Device::cuda;  // never read here
  const PackedWeights dense = dense_weights(w);
  EXPECT_EQ(dense.order, WeightOrder::dense);
  EXPECT_EQ(dense.rows, 6);
  EXPECT_EQ(dense.columns, 16);
  EXPECT_FALSE(dense.data.given());
  expect(refusal([&] { dense_weights(bf16.view()); }),
         "[dense_weights] weights is on the CPU: order dense is for GPUs");
  expect(refusal([&] { dense_weights(wide); }), "weights is float32: it must be float16 or bfloat16");
  TensorView strided = w;
  strided.stride[0] = 24;
  expect(refusal([&] { dense_weights(strided); }), "it must be [6, 16], contiguous");
  TensorView odd = w;
  odd.shape[0] = 5;
  expect(refusal([&] { dense_weights(odd, true); }), "weights.rows is 5: gated weights have an even number of rows");
  expect(refusal([&] { dense_weights({}); }), "weights is missing");

  TensorView x = w;
  x.shape[0] = 2;
  LinearOptions options;
  options.int8_x = true;
  expect(refusal([&] { linear_forward_workspace(x, dense, options); }), "int8_x is set and weights are not quantised");
  PackedWeights both = dense;
  both.data = TensorView(w.data, DType::u8, {64});
  expect(refusal([&] { linear_forward_workspace(x, both); }),
         "weights.data is given: order dense has weights.kept alone");
  PackedWeights none = dense;
  none.kept = {};
  expect(refusal([&] { linear_forward_workspace(x, none); }), "weights.kept is missing: in order dense it is W");
  expect(refusal([&] { unpack_weights(dense, w); }), "weights are in order dense: weights.kept is W as it is");
  expect(refusal([&] { packed_storage(lowbit::format_named("nvfp4"), 32, 64, false, WeightOrder::dense); }),
         "order is dense: it has no low-bit storage; dense_weights() views W");
  const kit::LinearLayer layer({.N = 32, .K = 64});
  expect(refusal([&] { pack_weights(layer.quantized.matrix(), dense); }),
         "out is in order dense: its weights are not quantised");
  EXPECT_STREQ(name_of(WeightOrder::dense), "dense");
}

TEST(UnpackWeights, KeptCopiesAreChecked) {
  const kit::LinearLayer layer({.N = 32, .K = 64, .dtype = DType::bf16});
  const HostTensor kept = HostTensor::input(DType::bf16, {32, 64});
  PackedWeights weights = layer.packed.weights();
  const HostTensor y = layer.output();
  weights.kept = kept.view();
  expect(refusal([&] { explain_linear(layer.x.view(), weights); }),
         "weights.kept is given and weights are on the CPU: it is for GPUs");
  // As if it were on a GPU: nothing is read.
  const PackedMemory matrix(layer.quantized.matrix(), false, WeightOrder::matrix);
  weights = matrix.weights();
  weights.kept = kept.view();
  TensorView x = layer.x.view();
  weights.device = weights.data.device = weights.kept.device = x.device = Device::cuda;
  bool listed = false;
  for (const Candidate& c : explain_linear(x, weights)) listed |= c.name == "cublaslt";
  for (const Candidate& c : explain_linear(x, weights)) EXPECT_TRUE(c.supported || !c.reason.empty()) << c.name;
  EXPECT_TRUE(listed);
  PackedWeights bad = weights;
  bad.kept.dtype = DType::f32;
  expect(refusal([&] { explain_linear(x, bad); }), "weights.kept is float32: it must be float16 or bfloat16");
  bad = weights;
  bad.kept.shape[0] = 16;
  expect(refusal([&] { explain_linear(x, bad); }), "weights.kept is [16, 64]: it must be [32, 64], contiguous");
  bad = weights;
  bad.kept.device = Device::cpu;
  expect(refusal([&] { explain_linear(x, bad); }), "weights.kept is on another device than weights");
}

}  // namespace
}  // namespace heddle

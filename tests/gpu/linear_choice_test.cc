// Which candidate a linear layer on the GPU takes, and what none takes.
#include <gtest/gtest.h>

#include <string>

#include "gpu/layer_on_gpu.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"
#include "kit/messages.h"

namespace heddle::kit {
namespace {

// On Hopper its own kernels have the formats that they take, but for one row of small layers; the others' weights
// are decoded in front of many rows of bfloat16, but not of float16, which does not hold all of them.
TEST(GpuLinearChoice, ByFormatAndRows) {
  for (const char* format : {"nvfp4", "mxfp4", "e2m1_row", "int4_g128", "nf4", "int8_row", "fp8_row"}) {
    for (const std::int64_t rows : {1, 8, 16, 64, 4096}) {
      const std::int64_t size = rows == 1 ? 4096 : 8192;
      PackedWeights weights = packed_storage(lowbit::format_named(format), size, size, false, WeightOrder::fragments16);
      weights.device = weights.data.device = Device::cuda;
      TensorView x(nullptr, DType::bf16, {rows, size});
      x.device = Device::cuda;
      std::string chosen;
      bool cublaslt = false;  // whether the library was found
      for (const Candidate& candidate : explain_linear(x, weights)) {
        if (candidate.chosen) chosen = candidate.name;
        if (std::string(candidate.name) == "cublaslt") cublaslt = candidate.supported;
      }
      const bool e2m1 = std::string(format).find("fp4") == 2 || format[0] == 'e';
      x.dtype = DType::f16;
      for (const Candidate& candidate : explain_linear(x, weights)) {
        EXPECT_FALSE(candidate.chosen && candidate.name == std::string("cublaslt")) << format << ", " << rows;
      }
      const bool decoded = !e2m1 && rows == 4096 && cublaslt;
      EXPECT_EQ(chosen, e2m1 && rows == 1                  ? "sm80_gemv"
                        : e2m1 && current_gpu().major == 9 ? "sm90_w4a16"
                        : decoded                          ? "cublaslt"
                                                           : "sm80_linear")
          << format << ", " << rows;
    }
  }
}

TEST(GpuLinearChoice, Refusals) {
  const auto expect_refusal = [](void (*bend)(TensorView&, PackedWeights&), const std::string& message) {
    const LinearLayer layer({.rows = {4}, .N = 64, .K = 64, .dtype = DType::bf16, .order = WeightOrder::fragments16});
    const LayerOnGpu gpu(layer);
    TensorView x = gpu.x.view();
    PackedWeights weights = gpu.weights;
    bend(x, weights);
    expect_message([&] { linear_forward_workspace(x, weights); }, message);
  };
  expect_refusal([](TensorView& x, PackedWeights&) { x.device = Device::cpu; }, "another device");
  expect_refusal([](TensorView& x, PackedWeights&) { x.stride[0] = 68; }, "multiples of 16 bytes");
  expect_refusal([](TensorView& x, PackedWeights&) { x.dtype = DType::f32; }, "float16 or bfloat16");
  expect_refusal([](TensorView&, PackedWeights& w) { w.data.shape[0] -= 16; }, "weights.data is");
}

}  // namespace
}  // namespace heddle::kit

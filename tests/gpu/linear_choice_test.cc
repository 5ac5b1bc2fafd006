// Which candidate a linear layer on the GPU takes, and what none takes.
#include <gtest/gtest.h>

#include "gpu/layer_on_gpu.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"

namespace heddle::kit {
namespace {

// On Hopper its own kernels have the formats that they take, but for one row of small layers; the others' weights
// are decoded in front of many rows of bfloat16, but not of float16, which does not hold all of them.
TEST(GpuLinearChoice, ByFormatAndRows) {
  for (const char* format : {"nvfp4", "mxfp4", "e2m1_row", "int4_g128", "nf4", "int8_row", "fp8_row"}) {
    for (const std::int64_t rows : {1, 8, 16, 64, 4096}) {
      const std::int64_t size = rows == 1 ? 4096 : 8192;
      PackedWeights weights = packed_storage(lowbit::format_named(format), size, size, false, WeightOrder::fragments16);
      alignas(64) static std::byte somewhere[64];
      weights.data.data = somewhere;
      weights.device = weights.data.device = Device::cuda;
      TensorView x(somewhere, DType::bf16, {rows, size});
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

// Linear layers with few rows of x by "sm80_gemv".
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/layer_on_gpu.h"

namespace heddle::kit {
namespace {

// The kernel for few rows: all of its numbers of them, warps without blocks, slabs without rows, rows for its wider
// CTAs.
TEST(GpuLinearGemv, MatchesReference) {
  for (const char* format : {"nvfp4", "mxfp4", "e2m1_row"}) {
    const auto check_gemv = [&](LinearCase c) {
      c.format = format;
      c.order = WeightOrder::fragments16;
      check(c, "sm80_gemv");
    };
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t rows : {1, 2, 3, 5, 8}) {
        check_gemv({.rows = {rows}, .N = 200, .K = 288, .dtype = dtype});
        check_gemv({.rows = {rows}, .N = 8, .K = 32, .dtype = dtype});
        check_gemv({.rows = {rows}, .N = 64, .K = 5216, .dtype = dtype});
      }
      check_gemv({.rows = {2}, .N = 20008, .K = 160, .dtype = dtype});
      for (const Activation activation :
           {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu, Activation::swiglu}) {
        LinearCase c{
            .rows = {3}, .N = 336, .K = 256, .dtype = dtype, .activation = activation, .bias = true, .residual = true};
        check_gemv(c);
        c.in_place = true;
        check_gemv(c);
        c.norm = activation == Activation::relu ? Norm::layer_norm : Norm::rms_norm;
        c.x_mean = 2;
        check_gemv(c);
      }
    }
  }
  const LinearLayer layer({.rows = {1}, .N = 512, .K = 4096, .dtype = DType::bf16, .order = WeightOrder::fragments16});
  LayerOnGpu gpu(layer, "sm80_gemv");
  gpu.run(gpu.options());
  const std::vector<double> first = gpu.values();
  for (int i = 0; i < 20; ++i) {
    gpu.run(gpu.options());
    ASSERT_EQ(gpu.values(), first);
  }
}

TEST(GpuLinearGemv, Refusals) {
  const auto reason = [](std::int64_t rows, std::int64_t K, const char* format, bool invariant) {
    PackedWeights weights = packed_storage(lowbit::format_named(format), 64, K, false, WeightOrder::fragments16);
    weights.device = weights.data.device = Device::cuda;
    TensorView x(nullptr, DType::bf16, {rows, K});
    x.device = Device::cuda;
    LinearOptions options;
    options.batch_invariant = invariant;
    for (const Candidate& candidate : explain_linear(x, weights, options)) {
      if (candidate.name == "sm80_gemv") return candidate.reason;
    }
    return std::string("no such candidate");
  };
  EXPECT_EQ(reason(8, 64, "nvfp4", false).find("at most"), std::string::npos);
  EXPECT_NE(reason(9, 64, "nvfp4", false).find("at most 8 rows of x; found 9"), std::string::npos);
  EXPECT_NE(reason(8, 1 << 17, "nvfp4", false).find("must fit into shared memory"), std::string::npos);
  EXPECT_NE(reason(1, 64, "int8_row", false).find("nvfp4, mxfp4 and e2m1_row, not int8_row"), std::string::npos);
  EXPECT_NE(reason(1, 64, "nvfp4", true).find("another order"), std::string::npos);
}

}  // namespace
}  // namespace heddle::kit

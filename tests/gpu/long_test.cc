// Accuracy at the sizes that are advertised: long prefill and its gradients, judged on some rows and keys; decoding
// over 131072 keys; linear layers with long sums.
#include <gtest/gtest.h>

#include "gpu/layer_on_gpu.h"
#include "kernels/candidates.h"
#include "kit/long_case.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kSamples = 64;  // rows, and keys

std::vector<AttentionCase> gpu_cases() {
  std::vector<AttentionCase> cases = long_cases(false);
  for (const AttentionCase& spec : in_tf32(long_cases(false))) cases.push_back(spec);
  return cases;
}

class GpuLong : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(GpuLong, MatchesReferenceInSomeRowsAndKeys) {
  if (GetParam().dtype == DType::f8e4m3 && current_gpu().major != 9) GTEST_SKIP() << "only Hopper multiplies e4m3";
  LongCase at(GetParam(), kSamples, Device::cuda);
  std::int64_t served = 0;
  for (const std::string& candidate : at.candidates(Pass::forward)) {
    ++served;
    const CaseResult result = at.check_forward(candidate);
    EXPECT_TRUE(result.passed) << result.message();
  }
  // Under tf32 a backward takes o and lse of a forward in tf32, which some rows of the reference do not stand for.
  if (GetParam().precision == Precision::f32 && GetParam().has_backward()) {
    for (const std::string& candidate : at.candidates(Pass::backward)) {
      ++served;
      const CaseResult result = at.check_backward(candidate);
      EXPECT_TRUE(result.passed) << result.message();
    }
  }
  EXPECT_GT(served, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuLong, ::testing::ValuesIn(gpu_cases()), case_name);

TEST(GpuLongDecode, MatchesReferenceOver131072Keys) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const bool f8_cache : {false, true}) {
      AttentionCase spec{.name = std::string("decode_131072_") + name_of(dtype) + (f8_cache ? "_f8_cache" : ""),
                         .dtype = dtype,
                         .H = 8,
                         .Hkv = 2,
                         .Sq = 1,
                         .Sk = 131072,
                         .D = 128,
                         .Dv = 128};
      spec.f8_cache = f8_cache;
      spec.forward_only = true;
      CaseRunner runner(spec, 1, Device::cuda);
      EXPECT_EQ(runner.blind_spots(Pass::forward), "") << spec.name;
      const std::vector<std::string> candidates = runner.candidates(Pass::forward);
      EXPECT_FALSE(candidates.empty()) << spec.name;
      for (const std::string& candidate : candidates) {
        const CaseResult result = runner.check_forward(candidate);
        EXPECT_TRUE(result.passed) << result.message();
      }
    }
  }
}

// Few columns, each as long as a large model's.
TEST(GpuLongSums, OfLinearLayers) {
  for (const std::int64_t K : {8192, 28672}) {
    for (const std::int64_t rows : {1, 16, 128}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        check({.format = "nvfp4", .rows = {rows}, .N = 256, .K = K, .dtype = dtype, .order = WeightOrder::fragments16},
              "sm80_linear");
        check({.format = "int4_g128",
               .rows = {rows},
               .N = 256,
               .K = K,
               .dtype = dtype,
               .order = WeightOrder::fragments16},
              "sm80_linear");
        if (rows <= 8) {
          check(
              {.format = "nvfp4", .rows = {rows}, .N = 256, .K = K, .dtype = dtype, .order = WeightOrder::fragments16},
              "sm80_gemv");
        }
        if (current_gpu().major != 9) continue;
        check({.format = "nvfp4", .rows = {rows}, .N = 256, .K = K, .dtype = dtype, .order = WeightOrder::fragments16},
              "sm90_w4a16");
        check({.format = "mxfp4", .rows = {rows}, .N = 256, .K = K, .dtype = dtype, .order = WeightOrder::fragments8},
              "sm90_w4a8");
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit

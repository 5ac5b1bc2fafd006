// The judge of long sequences, on sequences that a CPU's tests have time for; and long sums of linear layers.
#include <gtest/gtest.h>

#include "kernels/linear_cases.h"
#include "kit/long_case.h"

namespace heddle::kit {
namespace {

class LongCases : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(LongCases, MatchReferenceInSomeRowsAndKeys) {
  LongCase at(GetParam(), 70);
  for (const std::string& candidate : at.candidates(Pass::forward)) {
    const CaseResult result = at.check_forward(candidate);
    EXPECT_TRUE(result.passed) << result.message();
  }
  if (!GetParam().has_backward()) return;
  for (const std::string& candidate : at.candidates(Pass::backward)) {
    const CaseResult result = at.check_backward(candidate);
    EXPECT_TRUE(result.passed) << result.message();
  }
}

INSTANTIATE_TEST_SUITE_P(Small, LongCases, ::testing::ValuesIn(long_cases(true)), case_name);

// What is found for some rows and keys is what the whole case's judge finds for them.
TEST(LongCases, AreJudgedAsAll) {
  for (const AttentionCase& spec : long_cases(true)) {
    if (spec.D != 64) continue;
    AttentionCase short_one = spec;
    short_one.Sq = short_one.Sk = 90;
    LongCase some(short_one, 90);  // all of them
    CaseRunner all(short_one);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const CaseResult x = pass == Pass::forward ? some.check_forward("cpu") : some.check_backward("cpu");
      const CaseResult y = all.check(pass, "cpu");
      for (std::size_t n = 0; n < x.tensors.size(); ++n) {
        EXPECT_EQ(x.tensors[n].tensor, y.tensors[n].tensor);
        EXPECT_NEAR(x.tensors[n].error, y.tensors[n].error, 1e-3 * y.tensors[n].error) << spec.name;
        EXPECT_NEAR(x.tensors[n].plain_error, y.tensors[n].plain_error, 1e-3 * y.tensors[n].plain_error) << spec.name;
      }
    }
  }
}

TEST(LongSums, OfLinearLayers) {
  for (const DType dtype : kDtypes) {
    expect_right({.format = "nvfp4", .rows = {3}, .N = 48, .K = 8192, .dtype = dtype});
    expect_right({.format = "int4_g128", .rows = {3}, .N = 48, .K = 28672, .dtype = dtype});
  }
}

}  // namespace
}  // namespace heddle::kit

// Gradients of every candidate, on every SIMD target, over the rows of the case table that have a backward.
#include <gtest/gtest.h>

#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

std::vector<AttentionCase> differentiable_cases() {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& row : attention_cases()) {
    if (row.has_backward()) cases.push_back(row);
  }
  return cases;
}

class AttentionBackward : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionBackward, MatchesReference) {
  CaseRunner runner(GetParam());
  SCOPED_TRACE(runner.data().describe());
  const std::vector<std::string> candidates = runner.candidates(Pass::backward);
  ASSERT_FALSE(candidates.empty()) << "only the reference can do this case";
  // The reference's own candidate fits its judge: inputs, plain computation, bounds and outputs belong together.
  const CaseResult own = runner.check_backward("reference");
  EXPECT_TRUE(own.passed) << own.message();
  EXPECT_EQ(runner.blind_spots(Pass::backward), "");
  on_each_target([&] {
    for (const std::string& candidate : candidates) {
      const CaseResult result = runner.check_backward(candidate);
      EXPECT_TRUE(result.passed) << result.message();
    }
  });
}

// A gradient that is not asked for is not there to be written, and the others are what they are with it.
TEST(AttentionBackwardWanted, EachAloneAndAllButEach) {
  CaseRunner runner(attention_case("feature_all_scores_f32"));
  for (bool Wanted::*one : {&Wanted::dq, &Wanted::dk, &Wanted::dv, &Wanted::dbias, &Wanted::dsink}) {
    Wanted alone{false, false, false, false, false}, others;
    alone.*one = true;
    others.*one = false;
    for (const Wanted& wanted : {alone, others}) {
      for (const std::string& candidate : runner.candidates(Pass::backward)) {
        const CaseResult result = runner.check_backward(candidate, nullptr, wanted);
        EXPECT_TRUE(result.passed) << result.message();
        EXPECT_EQ(result.tensors.size(),
                  static_cast<std::size_t>(wanted.dq + wanted.dk + wanted.dv + wanted.dbias + wanted.dsink));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBackward, ::testing::ValuesIn(differentiable_cases()), case_name);

}  // namespace
}  // namespace heddle::kit

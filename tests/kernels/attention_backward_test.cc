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
  on_each_target([&] {
    for (const std::string& candidate : candidates) {
      const CaseResult result = runner.check_backward(candidate);
      EXPECT_TRUE(result.passed) << result.message();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBackward, ::testing::ValuesIn(differentiable_cases()), case_name);

}  // namespace
}  // namespace heddle::kit

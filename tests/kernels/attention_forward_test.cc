// Every candidate, on every SIMD target, over the whole case table.
#include <gtest/gtest.h>

#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

class AttentionForward : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionForward, MatchesReference) {
  CaseRunner runner(GetParam());
  SCOPED_TRACE(runner.data().describe());
  const std::vector<std::string> candidates = runner.candidates(Pass::forward);
  // The CPU's kernels read f8e4m3 in caches only; on a GPU these cases are for others than the reference.
  ASSERT_EQ(candidates.empty(), GetParam().dtype == DType::f8e4m3) << "only the reference can do this case";
  // The reference's own candidate fits its judge: inputs, plain computation, bounds and outputs belong together.
  const CaseResult own = runner.check_forward("reference");
  EXPECT_TRUE(own.passed) << own.message();
  EXPECT_EQ(runner.blind_spots(Pass::forward), "");
  on_each_target([&] {
    for (const std::string& candidate : candidates) {
      const CaseResult result = runner.check_forward(candidate);
      EXPECT_TRUE(result.passed) << result.message();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionForward, ::testing::ValuesIn(attention_cases()), case_name);

}  // namespace
}  // namespace heddle::kit

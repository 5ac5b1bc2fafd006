#include <gtest/gtest.h>
#include "kit/run_case.h"
namespace heddle::kit {
namespace {
class Kit : public ::testing::TestWithParam<AttentionCase> {};
// The reference's own candidate passes its own judge: inputs, plain computation, bounds and outputs fit together.
TEST_P(Kit, ReferencePassesItsOwnJudge) {
  CaseRunner runner(GetParam());
  const CaseResult forward = runner.check_forward("reference");
  EXPECT_TRUE(forward.passed) << forward.message();
  if (!GetParam().has_backward()) return;
  const CaseResult backward = runner.check_backward("reference");
  EXPECT_TRUE(backward.passed) << backward.message();
}
INSTANTIATE_TEST_SUITE_P(Cases, Kit, ::testing::ValuesIn(attention_cases()),
                         [](const auto& info) { return info.param.name; });
}  // namespace
}  // namespace heddle::kit

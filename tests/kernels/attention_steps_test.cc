// Rows and keys that stand for several positions each: what a mask of the same pairs gives, to the bit. Kernels are
// held to that by the case table, of which these are rows.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/candidates.h"
#include "kit/under_mask.h"

namespace heddle::kit {
namespace {

std::vector<AttentionCase> stepped_cases() {
  std::vector<AttentionCase> cases;
  for (const AttentionCase& row : attention_cases()) {
    if (row.stepped()) cases.push_back(row);
  }
  return cases;
}

class AttentionSteps : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionSteps, AreTheMaskThatSaysTheSame) {
  const CaseData stepped(GetParam()), masked = under_mask(stepped);
  const reference::Forward found = reference::attention_forward(stepped.problem(), default_executor()),
                           expected = reference::attention_forward(masked.problem(), default_executor());
  EXPECT_EQ(found.o, expected.o);
  EXPECT_EQ(found.lse, expected.lse);
}

TEST_P(AttentionSteps, HaveItsGradients) {
  if (!GetParam().has_backward()) GTEST_SKIP() << "attention has none";
  const CaseData stepped(GetParam()), masked = under_mask(stepped);
  const Gradients none = stepped.new_gradients();
  const reference::Backward found = reference::attention_backward(stepped.backward_problem(none), default_executor()),
                            expected = reference::attention_backward(masked.backward_problem(none), default_executor());
  EXPECT_EQ(found.dq, expected.dq);
  EXPECT_EQ(found.dk, expected.dk);
  EXPECT_EQ(found.dv, expected.dv);
  EXPECT_EQ(found.dsink, expected.dsink);
}

// None refuses steps that would take the mask.
TEST_P(AttentionSteps, EveryCandidateOfTheMaskServesThem) {
  CaseRunner runner(GetParam());
  const CaseData masked = under_mask(runner.data());
  const auto candidates = [&](const CaseData& data, Pass pass) {
    const Gradients to = data.new_gradients();
    const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
    return kernels_of(pass == Pass::forward ? explain_attention(q, k, v, data.options())
                                            : explain_attention_backward(q, k, v, to.views(), data.options()));
  };
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !GetParam().has_backward()) continue;
    EXPECT_EQ(candidates(runner.data(), pass), candidates(masked, pass));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionSteps, ::testing::ValuesIn(stepped_cases()), case_name);

// A row has the bits that it has among all rows: they follow from its own keys.
TEST(AttentionAnchors, AreTheRowsOfACallOfAllRows) {
  constexpr std::int64_t kStep = 4;
  AttentionCase spec{.name = "anchors", .B = 2, .H = 4, .Hkv = 2, .Sq = 160, .Sk = 160, .D = 32, .Dv = 32};
  spec.causal = Causal::top_left;
  spec.window_left = 70;
  const CaseData data(spec);
  AttentionOptions options = data.options();
  HostTensor all = data.new_o();
  WorkspaceBuffer buffer;
  const auto run = [&](const TensorView& q, const TensorView& o) {
    const Runtime runtime{.workspace =
                              buffer.get(attention_forward_workspace(q, data.k.view(), data.v.view(), options))};
    attention_forward(q, data.k.view(), data.v.view(), o, {}, options, runtime);
  };
  on_each_target([&] {
    options.q_step = 1;
    run(data.q.view(), all.view());
    TensorView q = data.q.view();
    q.shape[1] /= kStep;
    q.stride[1] *= kStep;
    options.q_step = kStep;
    HostTensor anchors = HostTensor::output(DType::f32, {2, 160 / kStep, 4, 32});
    run(q, anchors.view());
    for (std::int64_t n = 0; n < anchors.elements(); ++n) {
      const std::int64_t row = n / 128;
      ASSERT_EQ(anchors.get(n), all.get(row * kStep * 128 + n % 128)) << "row " << row;
    }
  });
}

}  // namespace
}  // namespace heddle::kit

// Every backward candidate of the GPU over the rows of the case table that have gradients, in both modes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <vector>

#include "core/check.h"
#include "gpu/device_backward.h"

namespace heddle::kit {
namespace {

// Rows that no candidate takes, in either mode. None may be: a gradient that is missing stops a training.
constexpr std::int64_t kUnserved = 0;

// Those also whose backward would take the CPU's tests too long: only they have many tiles with biases and masks.
std::vector<AttentionCase> differentiable_cases() {
  std::vector<AttentionCase> cases;
  for (AttentionCase row : attention_cases()) {
    row.forward_only = false;
    if (row.has_backward()) cases.push_back(row);
  }
  return cases;
}

std::string refusals(const CaseRunner& runner) {
  std::string out;
  const std::vector<std::string> cpu = CaseRunner(runner.data().spec).candidates(Pass::backward);
  for (const Candidate& candidate : runner.explain(Pass::backward)) {
    const bool of_cpu = candidate.method == "reference" || std::ranges::find(cpu, candidate.name) != cpu.end();
    if (!of_cpu) out += (out.empty() ? "" : "; ") + candidate.name + ": " + candidate.reason;
  }
  return out.empty() ? "this build has no backward for a GPU" : out;
}

// Whether this build has any at all for this GPU.
bool any_candidate() {
  static const bool any = std::ranges::any_of(differentiable_cases(), [](const AttentionCase& spec) {
    return !CaseRunner(spec, 1, Device::cuda).candidates(Pass::backward).empty();
  });
  return any;
}

class GpuBackward : public ::testing::TestWithParam<AttentionCase> {};

// Both modes in one test: what they are compared with takes longer than they do.
TEST_P(GpuBackward, MatchesReference) {
  CaseRunner runner(GetParam(), 1, Device::cuda);
  SCOPED_TRACE(runner.data().describe());
  bool any = false;
  for (bool deterministic : {false, true}) {
    runner.options().deterministic = deterministic;
    for (const std::string& candidate : runner.candidates(Pass::backward)) {
      SCOPED_TRACE(deterministic ? "deterministic" : "default");
      any = true;
      const CaseResult result = runner.check_backward(candidate);
      EXPECT_TRUE(result.passed) << result.message();
      if (!deterministic) continue;
      const BackwardOutputs first = runner.run_backward(candidate, nullptr, 0xFF);
      const BackwardOutputs second = runner.run_backward(candidate, nullptr, 0x00);
      EXPECT_TRUE(same_bits(first.gradients, second.gradients))
          << candidate << ": another workspace's contents, other bits";
    }
  }
  if (!any) GTEST_SKIP() << "no candidate of the GPU takes it: " << refusals(runner);
  EXPECT_EQ(runner.blind_spots(Pass::backward), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackward, ::testing::ValuesIn(differentiable_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Tf32, GpuBackward, ::testing::ValuesIn(in_tf32(differentiable_cases())), case_name);

// What sm80 says of pieces of longer problems, and of steps, that it does not serve.
bool is_known(const std::string& refusals) {
  return std::ranges::any_of(
      std::initializer_list<const char*>{"it has no dropout and no gradient of a bias", "it has no deterministic sums"},
      [&](const char* words) { return refusals.find(words) != std::string::npos; });
}

// What is not served is said, with the sentence that a user would read.
TEST(GpuBackwardCoverage, UnservedRowsAreListed) {
  if (!any_candidate()) GTEST_SKIP() << "no candidate of the GPU takes any row";
  for (bool deterministic : {false, true}) {
    std::map<std::string, std::vector<std::string>> unserved;  // by refusal
    std::int64_t count = 0;
    for (const AttentionCase& spec : differentiable_cases()) {
      CaseRunner runner(spec, 1, Device::cuda);
      runner.options().deterministic = deterministic;
      if (!runner.candidates(Pass::backward).empty()) continue;
      if ((spec.partial() || spec.stepped()) && is_known(refusals(runner))) continue;
      unserved[refusals(runner)].push_back(spec.name);
      ++count;
    }
    for (const auto& [why, names] : unserved) {
      std::cout << names.size() << " rows: " << why << "\n   ";
      for (const std::string& name : names) std::cout << ' ' << name;
      std::cout << '\n';
    }
    EXPECT_LE(count, kUnserved) << (deterministic ? "deterministic" : "default") << ": rows have no gradients";
  }
}

class GpuBackwardWanted : public ::testing::TestWithParam<const char*> {};

// A gradient that is not asked for is not there to be written, and the others are what they are with it.
TEST_P(GpuBackwardWanted, EachAloneAndAllButEach) {
  CaseRunner runner(attention_case(GetParam()), 1, Device::cuda);
  const std::vector<std::string> candidates = runner.candidates(Pass::backward);
  if (candidates.empty()) GTEST_SKIP() << "no candidate of the GPU takes it: " << refusals(runner);
  for (bool Wanted::*one : {&Wanted::dq, &Wanted::dk, &Wanted::dv, &Wanted::dbias, &Wanted::dsink}) {
    Wanted alone{false, false, false, false, false}, others;
    alone.*one = true;
    others.*one = false;
    for (const Wanted& wanted : {alone, others}) {
      SCOPED_TRACE(text("wanted: dq ", wanted.dq, ", dk ", wanted.dk, ", dv ", wanted.dv, ", dbias ", wanted.dbias,
                        ", dsink ", wanted.dsink));
      for (const std::string& candidate : candidates) {
        const CaseResult result = runner.check_backward(candidate, nullptr, wanted);
        EXPECT_TRUE(result.passed) << result.message();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuBackwardWanted,
                         ::testing::Values("round_s256_d64_causal_bf16", "round_s96_d80_gqa4_f16",
                                           "round_s64_d256_bf16", "feature_all_scores_f16", "feature_all_scores_f32",
                                           "feature_packed_all_bf16", "feature_bias_columns_f32",
                                           "corner_no_keys_sink_f16"),
                         [](const auto& info) { return std::string(info.param); });

// The better kernel is the one that runs.
TEST(GpuBackwardChoice, HopperTakesItsOwn) {
  if (!any_candidate()) GTEST_SKIP() << "no candidate of the GPU takes any row";
  for (std::int64_t size : {64, 128, 256}) {
    for (std::int64_t length : {512, 4096, 16384}) {
      TensorView x(nullptr, DType::bf16, {16384 / length, length, 2048 / size, size});
      x.device = Device::cuda;
      std::string chosen, expected;
      for (const Candidate& c : explain_attention_backward(x, x, x, {}, {})) {
        if (c.chosen) chosen = c.name;
        if (c.supported && (expected.empty() || c.name == "sm90")) expected = c.name;
      }
      EXPECT_EQ(chosen, expected) << "D " << size << ", S " << length;
    }
  }
}

}  // namespace
}  // namespace heddle::kit

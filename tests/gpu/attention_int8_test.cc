// Precision::int8_qk: the case table and rows of its own, who is asked, what is refused, and what is not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gpu/device_call.h"
#include "heddle/error.h"

namespace heddle::kit {
namespace {

constexpr const char* kCandidate = "sm80_int8";
// Rows that it takes, of in_int8_qk(). May rise.
constexpr int kServed = 115;

const std::vector<AttentionCase>& rows() {
  static const std::vector<AttentionCase> all = in_int8_qk(attention_cases());
  return all;
}
AttentionCase row(const std::string& name) {
  for (const AttentionCase& spec : rows()) {
    if (spec.name == name + "_int8_qk") return spec;
  }
  throw Error("no row " + name);
}

class GpuInt8Qk : public ::testing::TestWithParam<AttentionCase> {};

// Nothing but sm80_int8 runs under the precision, not even what is asked for by name.
TEST_P(GpuInt8Qk, MatchesReference) {
  CaseRunner runner(GetParam(), 1, Device::cuda);
  SCOPED_TRACE(runner.data().describe());
  const std::vector<std::string> candidates = runner.candidates(Pass::forward);
  if (candidates.empty()) GTEST_SKIP() << "refused";
  ASSERT_EQ(candidates, std::vector<std::string>{kCandidate});
  const CaseResult result = runner.check_forward("");
  EXPECT_TRUE(result.passed) << result.message();
  EXPECT_EQ(runner.blind_spots(Pass::forward), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuInt8Qk, ::testing::ValuesIn(rows()), case_name);

TEST(GpuInt8QkCoverage, RowsAreServed) {
  int served = 0;
  for (const AttentionCase& spec : rows()) {
    served += !CaseRunner(spec, 1, Device::cuda).candidates(Pass::forward).empty();
  }
  std::cout << served << " of " << rows().size() << " rows are served\n";
  EXPECT_GE(served, kServed);
}

std::string refusal(
    const std::string& name, void (*change)(AttentionOptions&) = [](AttentionOptions&) {}) {
  AttentionCase spec = row(name);
  CaseRunner runner(spec, 1, Device::cuda);
  change(runner.options());
  for (const Candidate& candidate : runner.explain(Pass::forward)) {
    if (candidate.name == kCandidate) return candidate.reason;
  }
  return "it is not listed";
}

TEST(GpuInt8QkRefusals, AreSentences) {
  EXPECT_EQ(refusal("round_s64_d64_bf16"), "");
  EXPECT_EQ(refusal("round_s64_d64_bf16", [](AttentionOptions& o) { o.precision = Precision::f32; }),
            "it multiplies q and k in 8 bits, which precision int8_qk asks for");
  EXPECT_EQ(refusal("round_s64_d64_bf16", [](AttentionOptions& o) { o.softcap = 3; }), "it has no softcap");
  EXPECT_EQ(refusal("round_s64_d64_bf16", [](AttentionOptions& o) { o.scale = -0.5f; }),
            "scale must be positive; found -0.5");
  EXPECT_EQ(refusal("round_s64_d64_bf16", [](AttentionOptions& o) { o.dropout.p = 0.5f; }), "it has no dropout");
  EXPECT_EQ(refusal("corner_scale_zero_bf16"), "scale must be positive; found 0");
  EXPECT_EQ(refusal("corner_bias_holes_bf16"), "it has no bias");
  EXPECT_EQ(refusal("corner_mask_holes_f16"), "it has no mask");
  EXPECT_EQ(refusal("corner_alibi_tiles_bf16"), "it has no ALiBi");
  EXPECT_EQ(refusal("corner_bias_tiles_d256_bf16"), "head sizes must be at most 128; found 256 and 256");
}

TEST(GpuInt8QkRefusals, OthersDoNotStandIn) {
  CaseRunner runner(row("round_s64_d64_bf16"), 1, Device::cuda);
  for (const Candidate& candidate : runner.explain(Pass::forward)) {
    if (candidate.name == kCandidate || candidate.method == "reference") continue;
    EXPECT_FALSE(candidate.supported) << candidate.name;
    EXPECT_NE(candidate.reason, "") << candidate.name;
  }
  try {
    runner.run_forward("sm80");
    FAIL() << "sm80 ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("it does not multiply q and k in 8 bits (int8_qk)"), std::string::npos)
        << error.what();
  }
  try {
    runner.explain(Pass::backward);
    FAIL() << "a backward was explained";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[explain_attention_backward] precision is int8_qk, which has no backward");
  }
}

// o and lse of a call with some elements changed before it.
ForwardOutputs run_changed(const AttentionCase& spec, void (*change)(HostTensor& q, HostTensor& k)) {
  DeviceCase at(spec, kCandidate);
  HostTensor q = at.runner.data().q, k = at.runner.data().k;
  change(q, k);
  const DeviceTensor device_q(q), device_k(k);
  at.call.q = device_q.view();
  at.call.k = device_k.view();
  at.call.run();
  return at.read();
}

// Causal, top left: rows from the bad key on attend it, and no other row may notice.
TEST(GpuInt8QkValues, KeysThatAreNotFiniteReachTheRowsThatAttendThem) {
  AttentionCase spec = row("far_keys_d128_bf16");
  spec.B = spec.H = 1, spec.Sq = spec.Sk = 300, spec.causal = Causal::top_left, spec.values = Values::normal;
  const ForwardOutputs zero = run_changed(spec, [](HostTensor&, HostTensor& k) {
    for (int d = 0; d < 128; ++d) k.set(150 * 128 + d, 0);
  });
  expect_finite(zero);
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    static double value;
    value = bad;
    const ForwardOutputs out = run_changed(spec, [](HostTensor&, HostTensor& k) {
      for (int d = 0; d < 128; ++d) k.set(150 * 128 + d, value);
    });
    for (int i = 0; i < 300; ++i) {
      EXPECT_EQ(std::isnan(out.lse.get(i)), i >= 150) << i;
      EXPECT_EQ(std::isnan(out.o.get(i * 128 + 7)), i >= 150) << i;
    }
  }
}

TEST(GpuInt8QkValues, RowsThatAreNotFiniteStayAlone) {
  AttentionCase spec = row("far_keys_d128_bf16");
  spec.B = spec.H = 1, spec.Sq = spec.Sk = 300, spec.causal = Causal::none;
  const ForwardOutputs before = run_changed(spec, [](HostTensor&, HostTensor&) {});
  const ForwardOutputs after = run_changed(spec, [](HostTensor& q, HostTensor&) { q.set(77 * 128 + 3, std::nan("")); });
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(std::isnan(after.lse.get(i)), i == 77) << i;
    if (i == 77) continue;
    EXPECT_EQ(after.lse.get(i), before.lse.get(i)) << i;
    EXPECT_EQ(after.o.get(i * 128 + 9), before.o.get(i * 128 + 9)) << i;
  }
}

// Zeros have no scale, and equal keys are all mean.
TEST(GpuInt8QkValues, ZerosAndEqualKeys) {
  AttentionCase spec = row("far_keys_bf16");
  spec.B = spec.H = 1;
  const auto expect_means = [&](const ForwardOutputs& out, double score) {
    CaseRunner runner(spec);
    for (int d = 0; d < 64; ++d) {
      double mean = 0;
      for (int j = 0; j < 700; ++j) mean += runner.data().v.get(j * 64 + d) / 700;
      for (int i = 0; i < 200; ++i) EXPECT_NEAR(out.o.get(i * 64 + d), mean, 1e-2) << i << ", " << d;
    }
    for (int i = 0; i < 200; ++i) EXPECT_NEAR(out.lse.get(i), std::log(700.0) + score, 1e-3) << i;
  };
  expect_means(run_changed(spec,
                           [](HostTensor& q, HostTensor&) {
                             for (std::int64_t n = 0; n < q.elements(); ++n) q.set(n, 0);
                           }),
               0);
  expect_means(run_changed(spec,
                           [](HostTensor& q, HostTensor& k) {
                             for (std::int64_t n = 0; n < q.elements(); ++n) q.set(n, 0.25);
                             for (std::int64_t n = 0; n < k.elements(); ++n) k.set(n, 50);
                           }),
               0.25 * 50 * 64 / 8);
}

// In a batch, packed, and again: the same bits.
TEST(GpuInt8QkValues, SameBits) {
  for (const char* name : {"far_keys_d128_bf16", "far_keys_used_f16", "d96_dv72_bf16"}) {
    DeviceCase at(row(name), kCandidate);
    at.call.run();
    const ForwardOutputs first = at.read();
    expect_finite(first);
    at.poison();
    at.call.run();
    EXPECT_TRUE(same_bits(first, at.read())) << name;
  }
  DeviceCase both(row("far_keys_d128_bf16"), kCandidate);
  both.call.run();
  const ForwardOutputs batch = both.read();
  both.poison();
  for (TensorView* x : {&both.call.q, &both.call.k, &both.call.v, &both.call.o, &both.call.lse}) *x = part(*x, 0, 1, 1);
  both.call.run();
  const ForwardOutputs alone = both.read();
  const std::int64_t half = batch.o.elements() / 2;
  for (std::int64_t n = half; n < 2 * half; ++n) ASSERT_EQ(alone.o.get(n), batch.o.get(n)) << n;
}

}  // namespace
}  // namespace heddle::kit

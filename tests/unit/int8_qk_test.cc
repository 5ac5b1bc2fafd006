// What Precision::int8_qk promises (docs/numerics.md), and that the rule for it can fail. Candidates of the CPU refuse
// it.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "heddle/attention.h"
#include "heddle/error.h"
#include "kernels/candidates.h"
#include "kit/quantized_heads.h"

namespace heddle::kit {
namespace {

std::vector<AttentionCase> far_rows() {
  std::vector<AttentionCase> out;
  for (const AttentionCase& row : in_int8_qk(attention_cases())) {
    if (row.values == Values::far_keys) out.push_back(row);
  }
  return out;
}

bool passes(const std::vector<double>& out, const std::vector<double>& expected, const PlainTensor& plain,
            DType dtype) {
  std::vector<double> rounded_out;
  for (double x : out) rounded_out.push_back(rounded(x, dtype));
  const std::vector<std::int64_t> shape = {static_cast<std::int64_t>(out.size())};
  return compare("x", rounded_out, expected, plain, shape, dtype, kFactorOfCodes).passed;
}

// Keys far from 0, about the same number: without smoothing, codes have no bits left for what differs.
TEST(Int8Qk, KeysFarFromZeroMustBeSmoothed) {
  ASSERT_GE(far_rows().size(), 10u);
  for (const AttentionCase& spec : far_rows()) {
    SCOPED_TRACE(spec.name);
    const CaseData data(spec);
    const AttentionProblem p = data.problem();
    const reference::Forward exact = reference::attention_forward(p, default_executor());
    const PlainForward plain = plain_forward(p), rough = plain_forward(p, Fault::unsmoothed_keys);
    EXPECT_TRUE(passes(exact.o, exact.o, plain.o, spec.dtype));
    for (std::size_t n = 0; n < kOrders.size(); ++n) {
      EXPECT_TRUE(passes(plain.o.values[n], exact.o, plain.o, spec.dtype));
      EXPECT_TRUE(passes(plain.lse.values[n], exact.lse, plain.lse, DType::f32));
      EXPECT_FALSE(passes(rough.o.values[n], exact.o, plain.o, spec.dtype));
      EXPECT_FALSE(passes(rough.lse.values[n], exact.lse, plain.lse, DType::f32));
    }
  }
}

// scale * (|q| s_k + |k'| s_q + D s_q s_k / 2) / 2 with |.| the sum of magnitudes, k' the key less the mean, and s the
// scales: half a code of each factor, times the other.
TEST(Int8Qk, ScoresAreOffByHalfACodeOfEachFactor) {
  for (const char* name : {"far_keys_bf16_int8_qk", "round_s128_d128_bf16_int8_qk"}) {
    for (const AttentionCase& spec : in_int8_qk(attention_cases())) {
      if (spec.name != name) continue;
      const CaseData data(spec);
      std::vector<std::vector<float>> keys(spec.Sk, std::vector<float>(spec.D)), rows(spec.Sq, keys[0]);
      for (std::int64_t d = 0; d < spec.D; ++d) {  // batch 0, head 0
        for (std::int64_t j = 0; j < spec.Sk; ++j) keys[j][d] = data.k.get(j * spec.Hkv * spec.D + d);
        for (std::int64_t i = 0; i < spec.Sq; ++i) rows[i][d] = data.q.get(i * spec.H * spec.D + d);
      }
      const QuantizedKeys quantized = quantized_keys(keys, spec.D, true);
      std::vector<double> largest(spec.Sk / 64 * 4 + 4);
      const auto group = [](std::int64_t j) { return j / 64 * 4 + j / 2 % 4; };
      const auto smoothed = [&](std::int64_t j, std::int64_t d) { return double{keys[j][d]} - quantized.mean[d]; };
      for (std::int64_t j = 0; j < spec.Sk; ++j) {
        for (std::int64_t d = 0; d < spec.D; ++d) {
          largest[group(j)] = std::max(largest[group(j)], std::abs(smoothed(j, d)));
        }
      }
      double closest = 0;
      for (std::int64_t i = 0; i < spec.Sq; ++i) {
        const std::vector<float> query = quantized_query(rows[i]);
        const double q_scale = largest_of(rows[i]) / 127;
        for (std::int64_t j = 0; j < spec.Sk; ++j) {
          const double k_scale = largest[group(j)] / 127;
          double error = 0, bound = spec.D * q_scale * k_scale / 4;
          for (std::int64_t d = 0; d < spec.D; ++d) {
            error += double{query[d]} * quantized.rows[j][d] - rows[i][d] * smoothed(j, d);
            bound += (std::abs(rows[i][d]) * k_scale + std::abs(smoothed(j, d)) * q_scale) / 2;
          }
          closest = std::max(closest, std::abs(error) / bound);
        }
      }
      EXPECT_GT(closest, 0.1) << name;
      EXPECT_LE(closest, 1.0001) << name;
    }
  }
}

TEST(Int8Qk, CandidatesOfTheCpuRefuse) {
  const std::vector<std::uint16_t> zeros(4 * 2 * 64);
  const TensorView q(zeros.data(), DType::bf16, {1, 4, 2, 64});
  AttentionOptions options;
  options.precision = Precision::int8_qk;
  int of_cpu = 0;
  for (const Candidate& candidate : explain_attention(q, q, q, options)) {
    EXPECT_FALSE(candidate.supported) << candidate.name;
    if (candidate.name != "cpu" && candidate.name != "cpu_baseline" && candidate.name != "reference") continue;
    EXPECT_EQ(candidate.reason, "it does not multiply q and k in 8 bits (int8_qk)") << candidate.name;
    ++of_cpu;
  }
  EXPECT_EQ(of_cpu, 3);
  try {
    attention_forward_workspace(q, q, q, options);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_TRUE(what.starts_with("[attention_forward] no candidate can serve this call; ")) << what;
    EXPECT_NE(what.find("cpu: it does not multiply q and k in 8 bits (int8_qk)"), std::string::npos) << what;
  }
  try {
    explain_attention_backward(q, q, q, {}, options);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[explain_attention_backward] precision is int8_qk, which has no backward");
  }
}

}  // namespace
}  // namespace heddle::kit

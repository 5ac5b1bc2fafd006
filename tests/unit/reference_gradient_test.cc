// The reference's gradients against central finite differences of its own forward, in double, for every differentiable
// input of each option.
#include <gtest/gtest.h>

#include <cmath>

#include "kit/run_case.h"
#include "reference/attention.h"

namespace heddle::kit {
namespace {

// Inputs are made multiples of 2^-10, so that x + n * 2^-8 is exact in f32.
constexpr double kGrid = 1024, kStep = 1.0 / 256;

void snap(HostTensor& x) {
  for (std::int64_t n = 0; n < x.elements(); ++n) {
    if (std::isfinite(x.get(n))) x.set(n, std::round(x.get(n) * kGrid) / kGrid);
  }
}

// The loss whose derivatives are d_o and d_lse.
double loss(const CaseData& data, const HostTensor& natural_lse) {
  const reference::Forward forward = reference::attention_forward(data.problem(), default_executor());
  double sum = 0;
  for (std::size_t n = 0; n < forward.o.size(); ++n) {
    const double d_o = data.d_o.get(static_cast<std::int64_t>(n));
    if (!std::isnan(d_o)) sum += d_o * forward.o[n];
  }
  for (std::int64_t n = 0; data.d_lse.given() && n < natural_lse.elements(); ++n) {
    if (std::isfinite(forward.lse[n])) sum += data.d_lse.get(n) * forward.lse[n];
  }
  return sum;
}

void expect_gradient(CaseData& data, HostTensor& x, const std::vector<double>& gradient, const char* name) {
  if (!x.given()) return;
  ASSERT_EQ(static_cast<std::int64_t>(gradient.size()), x.elements()) << name;
  const HostTensor lse = data.new_lse();
  for (std::int64_t n = 0; n < x.elements(); ++n) {
    const double value = x.get(n);
    if (!std::isfinite(value)) {  // never read, or removed
      EXPECT_EQ(gradient[n], 0) << name << " " << n;
      continue;
    }
    const auto at = [&](int steps) {
      x.set(n, value + steps * kStep);
      return loss(data, lse);
    };
    const double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);  // error O(step^4)
    x.set(n, value);
    EXPECT_NEAR(gradient[n], slope, 1e-6 * (1 + std::abs(slope))) << "d" << name << " " << n << " = " << value;
  }
}

class ReferenceGradient : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(ReferenceGradient, MatchesFiniteDifferences) {
  CaseData data(GetParam());
  for (HostTensor* x : {&data.q, &data.k, &data.v, &data.bias, &data.sink}) snap(*x);
  const Gradients outputs = data.new_gradients();
  const reference::Backward gradient =
      reference::attention_backward(data.backward_problem(outputs), default_executor());
  expect_gradient(data, data.q, gradient.dq, "q");
  expect_gradient(data, data.k, gradient.dk, "k");
  expect_gradient(data, data.v, gradient.dv, "v");
  expect_gradient(data, data.bias, gradient.dbias, "bias");
  expect_gradient(data, data.sink, gradient.dsink, "sink");
}

std::vector<AttentionCase> small_cases() {
  std::vector<AttentionCase> cases;
  const auto add = [&](const char* name, auto change) {
    AttentionCase c{.B = 2, .H = 2, .Hkv = 1, .Sq = 5, .Sk = 6, .D = 3, .Dv = 2};
    c.name = name;
    change(c);
    cases.push_back(c);
  };
  constexpr Extents kFull = {true, true, true, true, true};
  add("plain", [](auto&) {});
  add("lse", [](auto& c) { c.d_lse = true; });
  add("scale", [](auto& c) { c.scale = -0.7f; });
  add("causal_bottom_right", [](auto& c) { c.causal = Causal::bottom_right, c.Sq = 7; });
  add("causal_top_left", [](auto& c) { c.causal = Causal::top_left; });
  add("window_right", [](auto& c) { c.window_right = 1, c.Hkv = 2, c.d_lse = true; });
  add("window_top_left", [](auto& c) { c.window_left = c.window_right = 1, c.causal = Causal::top_left, c.Sq = 9; });
  add("window", [](auto& c) { c.window_left = 2, c.window_right = 1; });
  add("softcap", [](auto& c) { c.softcap = 1.5f, c.d_lse = true; });
  add("alibi", [](auto& c) { c.alibi = Alibi::per_batch; });
  add("bias", [=](auto& c) { c.bias = kFull; });
  add("bias_per_head", [](auto& c) { c.bias = {true, false, true, true, true}, c.d_lse = true; });
  add("bias_columns", [](auto& c) { c.bias = {true, true, false, false, true}, c.bias_holes = true; });
  add("bias_row_of_holes", [=](auto& c) { c.bias = kFull, c.bias_holes = c.d_lse = true; });
  add("bias_rows", [](auto& c) { c.bias = {true, false, false, true, false}; });
  add("bias_scalar", [](auto& c) { c.bias = {true}, c.d_lse = true; });
  add("bias_masked", [=](auto& c) { c.bias = c.mask = kFull, c.softcap = 3.0f; });
  add("mask", [=](auto& c) { c.mask = kFull, c.d_lse = true; });
  add("sink", [](auto& c) { c.sink = c.d_lse = true; });
  add("sink_empty_rows",
      [=](auto& c) { c.sink = c.d_lse = true, c.mask = kFull, c.causal = Causal::bottom_right, c.Sk = 3; });
  add("dropout", [](auto& c) { c.dropout = 0.4f, c.d_lse = true; });
  add("dropout_sink_packed_used", [](auto& c) {
    c.B = 3, c.dropout = 0.3f, c.sink = c.packed_q = c.packed_k = c.seqused_q = c.seqused_k = c.d_lse = true;
  });
  add("no_keys", [](auto& c) { c.Sk = 0, c.sink = c.d_lse = true; });
  add("one_key", [](auto& c) { c.Sk = 1, c.d_lse = true; });
  add("groups_of_3", [](auto& c) { c.H = 3, c.alibi = Alibi::per_head, c.mask = {true, true, false, false, true}; });
  add("packed", [](auto& c) { c.B = 3, c.packed_q = c.packed_k = c.d_lse = true, c.causal = Causal::bottom_right; });
  add("used", [=](auto& c) { c.B = 3, c.seqused_q = c.seqused_k = c.sink = c.d_lse = true, c.bias = kFull; });
  add("strided", [](auto& c) { c.layout_q = Layout::heads_first, c.layout_k = Layout::reversed; });
  add("all", [](auto& c) {
    c.B = 3, c.packed_q = c.packed_k = c.sink = c.d_lse = true, c.bias = {true, false, true, true, true};
    c.mask = {true, false, true, false, true}, c.softcap = 2.0f, c.dropout = 0.3f, c.alibi = Alibi::per_head;
    c.causal = Causal::bottom_right, c.window_left = 4;
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, ReferenceGradient, ::testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace heddle::kit

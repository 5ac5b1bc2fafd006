// Attention with a tolerance: no row is farther from exact attention than its bound says, no bound above tol; what was
// replaced is computed, forward and backward, as the reference has it for the same blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "kernels/candidates.h"
#include "kit/adaptive_case.h"
#include "reference/adaptive.h"

namespace heddle::kit {
namespace {

class Adaptive : public ::testing::TestWithParam<AdaptiveCase> {};

TEST_P(Adaptive, IsWithinItsBoundAndTheBoundWithinTheTolerance) {
  const AdaptiveCase& spec = GetParam();
  const CaseData data(spec.call);
  AdaptiveJudge judge(data);
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] {
    const AdaptiveResult found = run_adaptive(data, spec.tol, "cpu", one.get());
    EXPECT_EQ(judge.judge(spec.tol, found).message(), "");
    EXPECT_GT(found.blocks_replaced(), 0) << "the case shows nothing";
    EXPECT_TRUE(found.same_bits(run_adaptive(data, spec.tol, "cpu", five.get()))) << "other bits with other threads";
  });
}

TEST_P(Adaptive, HasTheGradientsOfWhatItComputed) {
  const AdaptiveCase& spec = GetParam();
  if (!spec.has_gradients()) GTEST_SKIP() << "it has none";
  const CaseData data(spec.call);
  AdaptiveJudge judge(data);
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] {
    const AdaptiveResult after = exact_for_blocks(data, spec.tol, run_adaptive(data, spec.tol, "cpu"));
    const Gradients found = run_adaptive_backward(data, after, "cpu", one.get());
    EXPECT_EQ(judge.judge(after, found).message(), "");
    const Gradients again = run_adaptive_backward(data, after, "cpu", five.get());
    EXPECT_TRUE(found.dq.same_bits(again.dq) && found.dk.same_bits(again.dk) && found.dv.same_bits(again.dv))
        << "other bits with other threads";
  });
}

// A backward takes any bits: those of another target, whose groups have other rows.
class AdaptiveOverOtherBlocks : public ::testing::TestWithParam<AdaptiveCase> {};

TEST_P(AdaptiveOverOtherBlocks, HasTheGradientsOfWhatTheReferenceReplaced) {
  const AdaptiveCase& spec = GetParam();
  if (!spec.has_gradients()) GTEST_SKIP() << "it has none";
  const CaseData data(spec.call);
  AdaptiveJudge judge(data);
  const AdaptiveResult after = exact_for_blocks(data, spec.tol, run_adaptive(data, spec.tol, "reference"));
  EXPECT_GT(after.blocks_replaced(), 0) << "the case shows nothing";
  on_each_quick_target([&] { EXPECT_EQ(judge.judge(after, run_adaptive_backward(data, after, "cpu")).message(), ""); });
}

std::vector<AdaptiveCase> every_fourth_case() {
  std::vector<AdaptiveCase> out;
  for (std::size_t n = 1; n < adaptive_cases().size(); n += 4) out.push_back(adaptive_cases()[n]);
  return out;
}

INSTANTIATE_TEST_SUITE_P(Cases, Adaptive, ::testing::ValuesIn(adaptive_cases()),
                         [](const auto& test) { return std::string(test.param.name); });
INSTANTIATE_TEST_SUITE_P(Cases, AdaptiveOverOtherBlocks, ::testing::ValuesIn(every_fourth_case()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(AdaptiveAttention, HoldsItsBoundWhateverTheCall) {
  std::mt19937 random(5);
  const auto below = [&](int n) { return static_cast<std::int64_t>(random() % n); };
  for (int n = 0; n < 32; ++n) {
    const DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
    const std::int64_t Hkv = 1 + below(3), H = Hkv * (1 + below(5)), Sk = 1 + below(300);
    AttentionCase call = adaptive_call(dtypes[below(3)], 1 + below(3), H, Hkv, 1 + below(80), Sk, 8 * (1 + below(9)));
    call.Dv = 1 + below(80);
    call.name = "fuzz_" + std::to_string(n);
    call.causal = static_cast<Causal>(below(3));
    if (below(3) == 0) call.window_left = below(200);
    if (below(3) == 0) call.window_right = below(200);
    call.sink = below(3) == 0;
    call.packed_q = call.packed_k = below(3) == 0;
    call.seqused_q = call.seqused_k = below(4) == 0;
    const float tol = std::pow(10.0f, -4.0f * static_cast<float>(below(1000)) / 1000.0f);  // 1e-4 to 1
    const CaseData data(call, 100 + n);
    AdaptiveJudge judge(data);
    SCOPED_TRACE(data.describe());
    const AdaptiveResult found = run_adaptive(data, tol, "cpu");
    EXPECT_EQ(judge.judge(tol, found).message(), "");
    if (n % 4 != 0) continue;
    const AdaptiveResult after = exact_for_blocks(data, tol, found);
    EXPECT_EQ(judge.judge(after, run_adaptive_backward(data, after, "cpu")).message(), "");
  }
}

// The faults above must be able to show: a bound that is cut, a result that is off, another block's bit.
TEST(AdaptiveAttention, WrongResultsAreSeen) {
  const AdaptiveCase& spec = adaptive_cases().front();
  const CaseData data(spec.call);
  AdaptiveJudge judge(data);
  const auto is_seen = [&](const AdaptiveResult& result) { return !judge.judge(spec.tol, result).passed; };
  const AdaptiveResult right = run_adaptive(data, spec.tol, "cpu");
  ASSERT_FALSE(is_seen(right));
  AdaptiveResult wrong = right;
  for (std::int64_t n = 0; n < wrong.bound.elements(); ++n) wrong.bound.set(n, 0.9 * right.bound.get(n));
  EXPECT_TRUE(is_seen(wrong));
  wrong = right;
  for (std::int64_t n = 0; n < wrong.bound.elements(); ++n) wrong.bound.set(n, spec.tol);
  EXPECT_TRUE(is_seen(wrong));
  wrong = right;
  wrong.o.set(7, right.o.get(7) + 0.01);
  EXPECT_TRUE(is_seen(wrong));
  wrong = right;
  static_cast<std::uint8_t*>(wrong.replaced.view().data)[0] ^= 1;
  EXPECT_TRUE(is_seen(wrong));
  const AdaptiveResult after = exact_for_blocks(data, spec.tol, right);
  Gradients gradients = run_adaptive_backward(data, after, "cpu");
  ASSERT_TRUE(judge.judge(after, gradients).passed);
  gradients.dv.set(3, gradients.dv.get(3) * 1.01 + 0.01);
  EXPECT_FALSE(judge.judge(after, gradients).passed);
}

TEST(AdaptiveAttention, BitsAreTheSameAloneAndInABatch) {
  const AttentionCase both =
      adaptive_call(DType::f32, 2, 4, 2, 150, 150, 32, [](auto& c) { c.causal = Causal::top_left; });
  AttentionCase alone = both;
  alone.B = 1;
  const CaseData of_both(both);
  CaseData of_one(alone);
  on_each_target([&] {
    const AdaptiveResult together = run_adaptive(of_both, 0.05f, "cpu");
    for (std::int64_t b = 0; b < 2; ++b) {
      const auto copy = [b](const HostTensor& from, HostTensor& to) {
        for (std::int64_t n = 0; n < to.elements(); ++n) to.set(n, from.get(b * to.elements() + n));
      };
      copy(of_both.q, of_one.q);
      copy(of_both.k, of_one.k);
      copy(of_both.v, of_one.v);
      const AdaptiveResult own = run_adaptive(of_one, 0.05f, "cpu");
      for (const auto& [part, whole] : {std::pair{&own.o, &together.o}, std::pair{&own.bound, &together.bound}}) {
        for (std::int64_t n = 0; n < part->elements(); ++n) {
          ASSERT_EQ(part->get(n), whole->get(b * part->elements() + n)) << "sequence " << b << ", element " << n;
        }
      }
    }
  });
}

// Values that are not finite are never averaged: rows that do not meet them keep their promise, and those that do get
// what exact attention has. As there, they may spread to rows of the same register tile.
TEST(AdaptiveAttention, ValuesThatAreNotFiniteStayWithTheRowsThatMeetThem) {
  constexpr std::int64_t kRows = 300, kKey = 250, kNeighbours = 48;
  constexpr float kTol = 0.5f;
  const AttentionCase call =
      adaptive_call(DType::f32, 1, 1, 1, kRows, kRows, 16, [](auto& c) { c.causal = Causal::top_left; });
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    CaseData data(call);
    data.v.set(kKey * 16 + 3, bad);
    on_each_target([&] {
      const AdaptiveResult found = run_adaptive(data, kTol, "cpu");
      EXPECT_GT(found.blocks_replaced(), 0);
      const reference::AdaptiveForward expected =
          reference::adaptive_forward(adaptive_problem(data, kTol, found), default_executor());
      for (std::int64_t i = 0; i < kRows; ++i) {
        if (i < kKey - kNeighbours) {
          EXPECT_NEAR(found.o.get(i * 16 + 3), expected.o[i * 16 + 3], 1e-5) << "row " << i;
        }
        if (i >= kKey) {
          EXPECT_FALSE(std::isfinite(found.o.get(i * 16 + 3))) << "row " << i;
        }
        EXPECT_NEAR(found.o.get(i * 16 + 2), expected.o[i * 16 + 2], 1e-5) << "row " << i;
        EXPECT_NEAR(found.bound.get(i), expected.bound[i], 0.05 * kTol) << "row " << i;
      }
    });
  }
}

TEST(AdaptiveAttention, ARowOfNoNumbersHasABoundThatIsNone) {
  CaseData data(adaptive_call(DType::f32, 1, 1, 1, 100, 200, 16));
  data.q.set(40 * 16, std::numeric_limits<double>::quiet_NaN());
  on_each_target([&] {
    const AdaptiveResult found = run_adaptive(data, 0.1f, "cpu");
    for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(std::isnan(found.bound.get(i)), i == 40) << "row " << i;
  });
}

TEST(AdaptiveAttention, ValuesOfAnySizeKeepTheBound) {
  for (const double size : {1e-38, 1e-33, 1e-20, 1.0, 1e15, 1e28, 1e33}) {
    CaseData data(adaptive_call(DType::f32, 1, 2, 1, 60, 290, 32));
    for (std::int64_t n = 0; n < data.v.elements(); ++n) data.v.set(n, data.v.get(n) * size);
    SCOPED_TRACE(size);
    const AdaptiveResult found = run_adaptive(data, 0.05f, "cpu");
    EXPECT_EQ(found.blocks_replaced() > 0, size >= 1e-20 && size <= 1e28);
    for (std::int64_t n = 0; n < found.bound.elements(); ++n) EXPECT_LE(found.bound.get(n), 0.05f);
    if (size >= 1e-20) {
      EXPECT_EQ(AdaptiveJudge(data).judge(0.05f, found).message(), "");
    }
  }
}

TEST(AdaptiveAttention, WhereAllValuesAreTheSameEverythingIsReplacedAtNoCost) {
  CaseData data(adaptive_call(DType::f32, 1, 2, 1, 60, 290, 32));
  for (std::int64_t n = 0; n < data.v.elements(); ++n) data.v.set(n, 0.25 * static_cast<double>(n % 32));
  const AdaptiveResult found = run_adaptive(data, 1e-4f, "cpu");
  EXPECT_EQ(found.blocks_replaced(), 10 * 10);  // 120 rows, 290 keys
  EXPECT_EQ(AdaptiveJudge(data).judge(1e-4f, found).message(), "");
}

TEST(AdaptiveAttention, RowsWithoutKeysAreEmpty) {
  const CaseData data(
      adaptive_call(DType::f32, 1, 1, 1, 200, 100, 16, [](auto& c) { c.causal = Causal::bottom_right; }));
  const AdaptiveResult found = run_adaptive(data, 0.1f, "cpu");
  for (std::int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(found.o.get(i * 16), 0);
    EXPECT_EQ(found.lse.get(i), -std::numeric_limits<double>::infinity());
    EXPECT_EQ(found.bound.get(i), 0);
  }
}

// Gradients of the reference against differences of its results, for blocks that stay the same.
TEST(AdaptiveAttention, TheReferencesGradientsAreDerivatives) {
  AttentionCase call = adaptive_call(DType::f32, 1, 2, 1, 14, 100, 8,
                                     [](auto& c) { c.sink = c.d_lse = true, c.causal = Causal::bottom_right; });
  call.softcap = 5;
  CaseData data(call);
  const AdaptiveResult blocks = run_adaptive(data, 0.3f, "reference");
  ASSERT_GT(blocks.blocks_replaced(), 0);
  const auto loss = [&] {
    const reference::AdaptiveForward out =
        reference::adaptive_forward(adaptive_problem(data, 0.3f, blocks), default_executor());
    double sum = 0;
    for (std::size_t n = 0; n < out.o.size(); ++n) sum += out.o[n] * data.d_o.get(static_cast<std::int64_t>(n));
    for (std::size_t n = 0; n < out.lse.size(); ++n) sum += out.lse[n] * data.d_lse.get(static_cast<std::int64_t>(n));
    return sum;
  };
  const Gradients none = data.new_gradients();
  const reference::Backward found =
      reference::adaptive_backward(adaptive_backward_problem(data, blocks, none), default_executor());
  const auto check = [&](HostTensor& x, const std::vector<double>& gradient, const char* name) {
    for (std::int64_t n = 0; n < x.elements(); n += 1 + x.elements() / 60) {
      constexpr double kStep = 1.0 / 1024;
      const double before = x.get(n);
      x.set(n, before + kStep);
      const double high = x.get(n), up = loss();
      x.set(n, before - kStep);
      const double low = x.get(n), down = loss();
      x.set(n, before);
      EXPECT_NEAR((up - down) / (high - low), gradient[n], 1e-4 * (1 + std::abs(gradient[n]))) << name << " " << n;
    }
  };
  check(data.q, found.dq, "q");
  check(data.k, found.dk, "k");
  check(data.v, found.dv, "v");
  check(data.sink, found.dsink, "sink");
}

// What must be refused, and how.
struct Refused {
  const char* what;
  void (*spoil)(AdaptiveOptions&, AttentionOptions&, AdaptiveOutputs&, TensorView& k);
  const char* message;
};

TEST(AdaptiveAttention, BadArgumentsAreNamed) {
  const CaseData data(adaptive_call(DType::f32, 2, 4, 2, 30, 70, 16));
  static const float numbers[4096] = {};
  static const std::uint8_t bytes[4096] = {};
  const Refused all[] = {
      {"tol 0", [](auto& a, auto&, auto&, auto&) { a.tol = 0; },
       "tol is 0: it must be a finite number above 0, in units of the largest norm of a value"},
      {"tol below 0", [](auto& a, auto&, auto&, auto&) { a.tol = -1; },
       "tol is -1: it must be a finite number above 0"},
      {"tol NaN", [](auto& a, auto&, auto&, auto&) { a.tol = std::numeric_limits<float>::quiet_NaN(); },
       "tol is nan: "},
      {"tol inf", [](auto& a, auto&, auto&, auto&) { a.tol = std::numeric_limits<float>::infinity(); }, "tol is inf: "},
      {"mask",
       [](auto&, auto& o, auto&, auto&) {
         o.mask = TensorView(bytes, DType::boolean, {1, 1, 30, 70});
       },
       "mask is given: attention with a tolerance has none"},
      {"bias",
       [](auto&, auto& o, auto&, auto&) {
         o.bias = TensorView(numbers, DType::f32, {1, 1, 30, 70});
       },
       "bias is given: "},
      {"dropout", [](auto&, auto& o, auto&, auto&) { o.dropout.p = 0.5f; }, "dropout.p is 0.5: it must be 0"},
      {"method", [](auto&, auto& o, auto&, auto&) { o.method = "flash"; }, "method is 'flash': "},
      {"precision", [](auto&, auto& o, auto&, auto&) { o.precision = Precision::tf32; }, "precision is not f32: "},
      {"force", [](auto&, auto& o, auto&, auto&) { o.force = "sm90"; },
       "force is 'sm90': the candidates are cpu, reference"},
      {"bound",
       [](auto&, auto&, auto& r, auto&) {
         r.bound = TensorView(numbers, DType::f32, {2, 4, 31});
       },
       "bound is [2, 4, 31]: it must be [B, H, Sq] = [2, 4, 30]"},
      {"replaced",
       [](auto&, auto&, auto& r, auto&) {
         r.replaced = TensorView(bytes, DType::u8, {2, 2, 4, 1});
       },
       "replaced is [2, 2, 4, 1]: it must be [2, 2, 5, W], a run for each 12 rows, and W at least 1, a bit for each 32 "
       "keys"},
      {"replaced's dtype",
       [](auto&, auto&, auto& r, auto&) {
         r.replaced = TensorView(numbers, DType::f32, {2, 2, 5, 1});
       },
       "replaced is float32: it must be uint8"},
      {"one memory", [](auto&, auto&, auto& r, auto&) { r.bound = r.lse; }, "lse and bound share memory"},
      {"a GPU", [](auto&, auto&, auto&, auto& k) { k.device = Device::cuda; }, "k is on another device"},
      {"8 bits", [](auto&, auto&, auto&, auto& k) { k.dtype = DType::f8e4m3; },
       "k is float8_e4m3fn: attention with a tolerance takes float32, float16 and bfloat16"},
  };  // fmt: skip
  for (const Refused& refused : all) {
    SCOPED_TRACE(refused.what);
    AdaptiveResult out(data);
    AdaptiveOptions adaptive;
    AttentionOptions options = data.options();
    AdaptiveOutputs outputs = out.views();
    TensorView k = data.k.view();
    refused.spoil(adaptive, options, outputs, k);
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(1 << 24);
    const HostTensor before = out.o;
    try {
      adaptive_attention_forward(data.q.view(), k, data.v.view(), outputs, adaptive, options, runtime);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(refused.message), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("[adaptive_attention_forward] "), 0u) << error.what();
    }
    EXPECT_TRUE(out.o.same_bits(before)) << "something was written";
  }
  EXPECT_THROW(on_exceed_named("guess"), Error);
  EXPECT_EQ(on_exceed_named("dense"), OnExceed::dense);
}

TEST(AdaptiveAttention, GradientsThatAreNotServedAreRefused) {
  const CaseData data(adaptive_call(DType::f32, 1, 2, 2, 30, 70, 16, [](auto& c) { c.softcap = 3; }));
  const AdaptiveResult after = run_adaptive(data, 0.1f, "cpu");
  try {
    run_adaptive_backward(data, after, "");
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cpu: it has no gradients with ALiBi or softcap"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(AdaptiveJudge(data).judge(after, run_adaptive_backward(data, after, "reference")).message(), "");
}

}  // namespace
}  // namespace heddle::kit

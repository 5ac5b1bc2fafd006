// merge_attention and its gradients against the reference in doubles; bits that are promised.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "kernels/candidates.h"
#include "kernels/merge_cases.h"
#include "reference/partial.h"

namespace heddle::kit {
namespace {

using std::int64_t;

void merge_here(std::span<const Partial> partials, const TensorView& o, const TensorView& lse, const TensorView& sink) {
  merge_attention(partials, o, lse, {.sink = sink});
}

class MergeAttention : public ::testing::TestWithParam<MergeCase> {};

TEST_P(MergeAttention, MatchesReference) {
  const MergeData parts(GetParam());
  on_each_target([&] {
    for (const DType dtype : merged_dtypes(parts.s)) {
      const CaseResult found = check_merge(parts, "cpu", dtype);
      EXPECT_TRUE(found.passed) << found.message();
      const HostTensor o = parts.rows(dtype), lse = parts.per_row(), alone = parts.rows(dtype),
                       wide = parts.rows(DType::f32);
      merge_attention(parts.partials, o.view(), lse.view(), {.sink = parts.sink.view()});
      merge_attention(parts.partials, alone.view(), {}, {.sink = parts.sink.view()});
      EXPECT_TRUE(alone.same_bits(o));
      merge_attention(parts.partials, wide.view(), {}, {.sink = parts.sink.view()});
      EXPECT_TRUE(is_rounded(o, wide));
    }
  });
}

TEST_P(MergeAttention, GradientsMatchReference) {
  const MergeData parts(GetParam());
  on_each_target([&] {
    const CaseResult found = check_merge_backward(parts, "cpu");
    EXPECT_TRUE(found.passed) << found.message();
    // One gradient alone is what it is beside the others.
    std::vector<HostTensor> lse;
    std::vector<Partial> all, one(parts.s.partials);
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      lse.push_back(parts.per_row());
      all.push_back({{}, lse.back().view()});
    }
    const HostTensor alone = parts.per_row();
    one[1].lse = alone.view();
    for (const auto& gradients : {all, one}) {
      merge_attention_backward(parts.partials, parts.d_o.view(), parts.d_lse.view(), gradients, {},
                               {.sink = parts.sink.view()});
    }
    EXPECT_TRUE(alone.same_bits(lse[1]));
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, MergeAttention, ::testing::ValuesIn(merge_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Of the loss sum(d_o o) + sum(d_lse lse), by differences in double of the reference's own forward.
TEST(MergeAttentionReference, GradientsAreDerivatives) {
  MergeData parts(merge_case("sink"));
  std::vector<HostTensor> o, lse;
  std::vector<Partial> gradients;
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    o.push_back(parts.rows(DType::f32));
    lse.push_back(parts.per_row());
    gradients.push_back({o.back().view(), lse.back().view()});
  }
  const reference::MergedBackward found = reference::merge_attention_backward(parts.backward_problem(gradients));
  const auto loss = [&] {
    const reference::Merged merged = reference::merge_attention(parts.problem());
    double sum = 0;
    for (std::size_t n = 0; n < merged.o.size(); ++n) sum += parts.d_o.get(static_cast<int64_t>(n)) * merged.o[n];
    for (std::size_t n = 0; n < merged.lse.size(); ++n) {
      if (merged.lse[n] > -kInfinity) sum += parts.d_lse.get(static_cast<int64_t>(n)) * merged.lse[n];
    }
    return sum;
  };
  const auto derivative = [&](const TensorView& x, int64_t at) {  // contiguous, f32
    auto* const value = static_cast<float*>(x.data) + at;
    const float before = *value;
    *value = before + 0x1p-8f;
    const double high = *value, above = loss();
    *value = before - 0x1p-8f;
    const double low = *value, below = loss();
    *value = before;
    return (above - below) / (high - low);
  };
  int compared = 0;
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    for (int64_t k = 0; k < parts.partials[n].lse.elements(); k += 5) {
      if (static_cast<float*>(parts.partials[n].lse.data)[k] == -kInfinity) continue;
      EXPECT_NEAR(found.partials[n].lse[k], derivative(parts.partials[n].lse, k), 2e-4);
      ++compared;
    }
    for (int64_t k = 0; k < parts.partials[n].o.elements(); k += 41) {
      if (std::isnan(static_cast<float*>(parts.partials[n].o.data)[k])) continue;
      EXPECT_NEAR(found.partials[n].o[k], derivative(parts.partials[n].o, k), 1e-9);
      ++compared;
    }
  }
  for (int64_t h = 0; h < parts.s.H; ++h) {
    EXPECT_NEAR(found.dsink[h], derivative(parts.sink.view(), h), 2e-4);
  }
  EXPECT_GT(compared, 50);
}

TEST(MergeAttentionBits, OnePartialComesBack) {
  on_each_target([] { expect_one_comes_back(merge_here); });
}

TEST(MergeAttentionBits, DoNotDependOnThreads) {
  const MergeData parts(merge_case("many"));
  std::vector<HostTensor> found;
  for (const int threads : {1, 3}) {
    const std::unique_ptr<Executor> pool = make_thread_pool(threads);
    Runtime runtime;
    runtime.executor = pool.get();
    found.push_back(parts.rows(DType::f32));
    merge_attention(parts.partials, found.back().view(), {}, {.sink = parts.sink.view()}, runtime);
  }
  EXPECT_TRUE(found[0].same_bits(found[1]));
}

TEST(MergeAttentionBits, InPlaceIsTheSame) {
  MergeData parts(merge_case("sink"));
  const HostTensor o = parts.rows(DType::f32), lse = parts.per_row();
  merge_attention(parts.partials, o.view(), lse.view(), {.sink = parts.sink.view()});
  const auto& [own, own_lse] = parts.partials[2];
  merge_attention(parts.partials, own, own_lse, {.sink = parts.sink.view()});
  for (int64_t n = 0; n < o.elements(); ++n) ASSERT_EQ(static_cast<float*>(own.data)[n], o.get(n));
  for (int64_t n = 0; n < lse.elements(); ++n) ASSERT_EQ(static_cast<float*>(own_lse.data)[n], lse.get(n));
}

TEST(MergeAttention, RowsWithoutKeys) {
  on_each_target([] { expect_rows_without_keys(merge_here); });
}
TEST(MergeAttention, WhatIsNotANumberStays) {
  on_each_target([] { expect_nan_stays(merge_here); });
}
TEST(MergeAttention, FarLogarithms) { expect_far_logarithms(merge_here); }

// What a row without keys has in d_o is not looked at.
TEST(MergeAttentionBackward, RowsWithoutKeysHaveNone) {
  float o[] = {4, 4}, lse[] = {-std::numeric_limits<float>::infinity(), 1}, d_o[] = {std::nanf(""), 2},
        d_lse[] = {3, 5};
  float to[] = {-7, -7}, to_lse[] = {-7, -7}, sink[] = {1}, dsink[] = {-7};
  const std::vector<Partial> partials{
      {TensorView(o, DType::f32, {1, 2, 1, 1}), TensorView(lse, DType::f32, {1, 1, 2})}};
  const std::vector<Partial> gradients{
      {TensorView(to, DType::f32, {1, 2, 1, 1}), TensorView(to_lse, DType::f32, {1, 1, 2})}};
  merge_attention_backward(partials, TensorView(d_o, DType::f32, {1, 2, 1, 1}),
                           TensorView(d_lse, DType::f32, {1, 1, 2}), gradients, TensorView(dsink, DType::f32, {1}),
                           {.sink = TensorView(sink, DType::f32, {1})});
  // The second row: both weights are 1/2 and o = 2, so d_lse_p = (2 (4 - 2) + 5) / 2, dsink = 3 + (5 - 4) / 2.
  EXPECT_EQ(to[0], 0);
  EXPECT_EQ(to[1], 1);
  EXPECT_EQ(to_lse[0], 0);
  EXPECT_EQ(to_lse[1], 4.5f);
  EXPECT_EQ(dsink[0], 3.5f);
}

}  // namespace
}  // namespace heddle::kit

// merge_attention and its gradients against the reference in doubles; bits that are promised.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/candidates.h"
#include "kernels/merge_cases.h"

namespace heddle::kit {
namespace {

using std::int64_t;

void merge_here(std::span<const Partial> partials, const TensorView& o, const TensorView& lse, const TensorView& sink) {
  merge_attention(partials, o, lse, {.sink = sink});
}

class MergeAttention : public ::testing::TestWithParam<MergeCase> {};

TEST_P(MergeAttention, MatchesReference) {
  const Parts parts(GetParam());
  const reference::Merged exact = reference::merge_attention(parts.problem());
  double size = 0;
  for (double x : exact.o) size = std::max(size, std::abs(x));
  on_each_target([&] {
    for (const DType dtype : {DType::f32, parts.s.dtype}) {
      const HostTensor o = parts.rows(dtype), lse = parts.per_row();
      merge_attention(parts.partials, o.view(), lse.view(), {.sink = parts.sink.view()});
      // A product, a sum and a rounded exponential for each part, and the division; parts cancel at most to nothing.
      expect_near(o, exact.o, 2 * static_cast<double>(parts.s.partials) + 3, 4 * size);
      expect_near(lse, exact.lse, 1, 1);
      const HostTensor alone = parts.rows(dtype);
      merge_attention(parts.partials, alone.view(), {}, {.sink = parts.sink.view()});
      EXPECT_TRUE(alone.same_bits(o));
    }
  });
}

TEST_P(MergeAttention, GradientsMatchReference) {
  const Parts parts(GetParam());
  on_each_target([&] {
    std::vector<HostTensor> o, lse;
    std::vector<Partial> gradients;
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      o.push_back(parts.rows(parts.s.dtype));
      lse.push_back(parts.per_row());
      gradients.push_back({o.back().view(), lse.back().view()});
    }
    const reference::MergedBackward exact = reference::merge_attention_backward(parts.backward_problem(gradients));
    HostTensor dsink;
    if (parts.s.sink) dsink = HostTensor::output(DType::f32, {parts.s.H});
    merge_attention_backward(parts.partials, parts.d_o.view(), parts.d_lse.view(), gradients, dsink.view(),
                             {.sink = parts.sink.view()});
    const double d_o = largest(parts.d_o), dims = static_cast<double>(parts.s.Dv);
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      expect_near(o[n], exact.partials[n].o, 2, d_o);
      // Dot products of Dv terms, each at most the product of the largest; values of o are below 6.
      expect_near(lse[n], exact.partials[n].lse, dims, 6 * d_o * std::sqrt(dims));
    }
    if (parts.s.sink) {
      expect_near(dsink, exact.dsink, dims, 6 * d_o * std::sqrt(dims) * static_cast<double>(parts.s.S * parts.s.B));
    }
    // One gradient alone is what it is beside the others.
    std::vector<Partial> one(parts.s.partials);
    const HostTensor alone = parts.per_row();
    one[1].lse = alone.view();
    merge_attention_backward(parts.partials, parts.d_o.view(), parts.d_lse.view(), one, {},
                             {.sink = parts.sink.view()});
    EXPECT_TRUE(alone.same_bits(lse[1]));
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, MergeAttention, ::testing::ValuesIn(kMergeCases),
                         [](const auto& info) { return std::string(info.param.name); });

// Of the loss sum(d_o o) + sum(d_lse lse), by differences in double of the reference's own forward.
TEST(MergeAttentionReference, GradientsAreDerivatives) {
  Parts parts(merge_case("sink"));
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
  const Parts parts(merge_case("many"));
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
  Parts parts(merge_case("sink"));
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

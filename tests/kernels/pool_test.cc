// pool_keys and its gradient against the reference in doubles.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "heddle/nsa.h"
#include "kernels/candidates.h"
#include "kernels/elsewhere.h"
#include "kit/pool_case.h"
#include "ops/nsa/nsa.h"
#include "reference/nsa.h"

namespace heddle::kit {
namespace {

using Pool = PoolTest;

TEST_P(Pool, MatchesReference) {
  const HostTensor x = tensor(s.S, false);
  on_each_target([&] {
    const HostTensor found = tensor(rows(), true);
    pool_keys(x.view(), found.view(), options);
    const std::vector<double> exact =
        reference::pool_keys(checked_pool_problem(Check("pool_keys"), x.view(), found.view(), options));
    expect_near(found, exact, s.block, x);
    const HostTensor plain = tensor(rows(), true);
    PoolOptions by_reference = options;
    by_reference.force = "reference";
    pool_keys(x.view(), plain.view(), by_reference);
    expect_near(plain, exact, 1, x);
  });
}

TEST_P(Pool, GradientMatchesReference) {
  const HostTensor d_pooled = tensor(rows(), false);
  on_each_target([&] {
    const HostTensor found = tensor(s.S, true);
    pool_keys_backward(d_pooled.view(), found.view(), options);
    const std::vector<double> exact = reference::pool_keys_backward(
        checked_pool_backward_problem(Check("pool_keys_backward"), d_pooled.view(), found.view(), options));
    expect_near(found, exact, (s.block + s.stride - 1) / s.stride, d_pooled);
  });
}

// <pooled, d_pooled> = <x, dx>: pooling is linear.
TEST_P(Pool, GradientIsTheTranspose) {
  HostTensor x = tensor(s.S, false), pooled = tensor(rows(), true), d_pooled = tensor(rows(), false),
             dx = tensor(s.S, true);
  if (s.layout == Layout::expanded) GTEST_SKIP() << "its elements are not each its own";
  const std::vector<double> forward =
      reference::pool_keys(checked_pool_problem(Check("pool_keys"), x.view(), pooled.view(), options));
  const std::vector<double> backward = reference::pool_keys_backward(
      checked_pool_backward_problem(Check("pool_keys_backward"), d_pooled.view(), dx.view(), options));
  double left = 0, right = 0;
  for (std::size_t n = 0; n < forward.size(); ++n) left += forward[n] * d_pooled.get(static_cast<int64_t>(n));
  for (std::size_t n = 0; n < backward.size(); ++n) right += backward[n] * x.get(static_cast<int64_t>(n));
  EXPECT_NEAR(left, right, 1e-9);
}

TEST_P(Pool, BitsDoNotDependOnThreads) {
  const HostTensor x = tensor(s.S, false), d_pooled = tensor(rows(), false);
  std::vector<HostTensor> pooled, dx;
  for (const int threads : {1, 5}) {
    const std::unique_ptr<Executor> pool = make_thread_pool(threads);
    Runtime runtime;
    runtime.executor = pool.get();
    pooled.push_back(tensor(rows(), true));
    dx.push_back(tensor(s.S, true));
    pool_keys(x.view(), pooled.back().view(), options, runtime);
    pool_keys_backward(d_pooled.view(), dx.back().view(), options, runtime);
  }
  EXPECT_TRUE(pooled[0].same_bits(pooled[1]));
  EXPECT_TRUE(dx[0].same_bits(dx[1]));
}

INSTANTIATE_TEST_SUITE_P(Cases, Pool, ::testing::ValuesIn(pool_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// A cache that grows: pooled rows are written when keys complete their blocks, once each, with the bits that pooling
// all keys at once gives; no other row is touched.
TEST(PoolAppended, RowsOfNewBlocksAloneAreWritten) {
  constexpr int64_t kCapacity = 90, kHeads = 2, kSize = 24;
  for (const auto& [block, stride] : {std::pair<int64_t, int64_t>{16, 16}, {16, 4}, {10, 3}, {90, 7}}) {
    HostTensor x = HostTensor::input(DType::f32, {2, kCapacity, kHeads, kSize});
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    for (int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
    const int64_t rows = (kCapacity - block) / stride + 1;
    const HostTensor grown = HostTensor::output(DType::f32, {2, rows, kHeads, kSize}), fresh = grown;
    HostTensor used = HostTensor::input(DType::i32, {2});
    PoolOptions options{.block = block, .stride = stride, .seqused = used.view()};
    int64_t lengths[2] = {0, 30};
    for (const int64_t appended : {int64_t{1}, int64_t{20}, int64_t{1}, int64_t{13}, int64_t{25}}) {
      const HostTensor before = grown;
      for (int b = 0; b < 2; ++b) used.set(b, static_cast<double>(lengths[b] + appended));
      HostTensor all = HostTensor::output(DType::f32, {2, rows, kHeads, kSize});
      pool_keys(x.view(), all.view(), options);
      options.appended = appended;
      for (const char* candidate : {"reference", "cpu"}) {
        options.force = candidate;
        extend_pooled_keys(x.view(), grown.view(), options);
      }
      options.appended = 0;
      options.force = "";
      const auto complete = [&](int64_t keys) { return keys < block ? 0 : (keys - block) / stride + 1; };
      for (int64_t n = 0; n < grown.elements(); ++n) {
        const int64_t b = n / (rows * kHeads * kSize), row = n / (kHeads * kSize) % rows;
        const bool is_new = row >= complete(lengths[b]) && row < complete(lengths[b] + appended);
        const double found = grown.get(n), expected = is_new ? all.get(n) : before.get(n);
        ASSERT_TRUE(found == expected || (std::isnan(found) && std::isnan(expected)))
            << "block " << block << ", row " << row << " of sequence " << b << ": " << found << ", not " << expected;
      }
      for (int64_t& length : lengths) length += appended;
    }
    EXPECT_EQ(grown.damage(), "");
    EXPECT_FALSE(grown.same_bits(fresh));
  }
}

TEST(PoolAppended, WhatItRefuses) {
  const HostTensor x = HostTensor::input(DType::f32, {2, 40, 1, 4}),
                   pooled = HostTensor::output(DType::f32, {2, 3, 1, 4});
  HostTensor used = HostTensor::input(DType::i32, {2});
  used.set(0, 3);
  used.set(1, 40);
  const PoolOptions right{.block = 16, .stride = 10, .seqused = used.view(), .appended = 1};
  const auto refused = [&](PoolOptions options) {
    try {
      extend_pooled_keys(x.view(), pooled.view(), options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(right), "");
  PoolOptions options = right;
  options.appended = 0;
  EXPECT_EQ(refused(options), "[extend_pooled_keys] appended is 0: it must be at least 1");
  options = right;
  options.seqused = {};
  EXPECT_EQ(refused(options), "[extend_pooled_keys] seqused is missing");
  options = right;
  options.stride = 8;
  EXPECT_EQ(refused(options).rfind("[extend_pooled_keys] k_pooled is ", 0), 0) << refused(options);
  EXPECT_THROW(pool_keys(x.view(), pooled.view(), right), Error);
}

// A packed sequence's rows are those of the sequence alone, where cu_seqlens / stride says.
TEST(PoolPacked, ASequenceAloneIsTheSequenceAmongOthers) {
  const std::vector<int64_t> starts = {0, 5, 45, 45, 101};
  HostTensor x = HostTensor::input(DType::f32, {101, 2, 12}), cu = indices(starts);
  for (int64_t n = 0; n < x.elements(); ++n) x.set(n, std::sin(static_cast<double>(n)));
  const PoolOptions options{.block = 16, .stride = 8, .cu_seqlens = cu.view()};
  const HostTensor all = HostTensor::output(DType::f32, {12, 2, 12});
  pool_keys(x.view(), all.view(), options);
  std::vector<double> expected(12 * 24);
  for (std::size_t b = 0; b + 1 < starts.size(); ++b) {
    const int64_t length = starts[b + 1] - starts[b];
    if (length < 16) continue;
    TensorView one = x.view();
    one.data = static_cast<float*>(one.data) + starts[b] * 24;
    one = TensorView(one.data, DType::f32, {1, length, 2, 12});
    const HostTensor alone = HostTensor::output(DType::f32, {1, (length - 16) / 8 + 1, 2, 12});
    pool_keys(one, alone.view(), {.block = 16, .stride = 8});
    const std::vector<double> values = alone.values();
    std::ranges::copy(values, expected.begin() + starts[b] / 8 * 24);
  }
  EXPECT_EQ(all.values(), expected);
}

TEST(PoolChoice, ListsWhatThereIs) {
  float x[48] = {}, pooled[12] = {};
  const TensorView keys(x, DType::f32, {1, 12, 1, 4}), blocks(pooled, DType::f32, {1, 3, 1, 4});
  const PoolOptions options{.block = 4, .stride = 4};
  for (const auto& list :
       {explain_pool_keys(keys, blocks, options), explain_pool_keys_backward(blocks, keys, options)}) {
    ASSERT_EQ(list.size(), 3u);
    EXPECT_EQ(list[0].name, "cpu");
    EXPECT_EQ(list[0].method, "pool");
    EXPECT_TRUE(list[0].chosen);
    EXPECT_EQ(list[0].workspace, 0u);
    EXPECT_NE(list[0].plan, "");
    EXPECT_EQ(list[1].reason, "it runs only when it is asked for");
    EXPECT_EQ(list[2].name, "cuda");
    EXPECT_EQ(list[2].reason, refusal_of_cpu_tensors());
  }
}

}  // namespace
}  // namespace heddle::kit

// pool_keys and its gradient against the reference in doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "heddle/nsa.h"
#include "kernels/candidates.h"
#include "kit/host_tensor.h"
#include "ops/nsa/nsa.h"
#include "reference/nsa.h"

namespace heddle::kit {
namespace {

using std::int64_t;

struct PoolCase {
  const char* name;
  DType dtype;
  int64_t B, S, H, D, block, stride;
  std::vector<int64_t> starts = {};  // cu_seqlens
  std::vector<int64_t> used = {};
  Layout layout = Layout::contiguous;
};
void PrintTo(const PoolCase& c, std::ostream* out) { *out << c.name; }

const std::vector<PoolCase>& pool_cases() {
  using enum DType;
  static const std::vector<PoolCase> all = {
      {"plain", f32, 2, 200, 2, 64, 64, 64},
      {"overlapping", f32, 2, 150, 3, 40, 32, 16},
      {"not_a_divisor", f32, 1, 61, 2, 33, 10, 3},
      {"bf16", bf16, 2, 130, 2, 128, 32, 16},
      {"f16", f16, 1, 130, 2, 31, 16, 16},
      {"one_key", f32, 1, 9, 2, 5, 1, 1},
      {"block_of_all", f32, 2, 48, 1, 8, 48, 5},
      {"shorter_than_a_block", f32, 2, 47, 1, 8, 48, 5},
      {"no_keys", f32, 2, 0, 1, 8, 4, 4},
      {"one_dim", f32, 1, 70, 3, 1, 8, 4},
      {"wide", f32, 1, 70, 2, 515, 16, 8},
      {"widest_head_bf16", bf16, 1, 70, 2, 256, 16, 8},
      {"packed", f32, 6, 300, 2, 24, 32, 16, {0, 0, 31, 63, 63, 200, 300}},
      {"packed_odd", bf16, 5, 100, 1, 17, 7, 3, {0, 6, 13, 14, 50, 100}},
      {"packed_none", f32, 2, 0, 1, 8, 4, 4, {0, 0, 0}},
      {"packed_one", f16, 1, 65, 2, 8, 64, 64, {0, 65}},
      {"used", f32, 4, 90, 2, 16, 16, 8, {}, {0, 15, 40, 90}},
      {"packed_used", f32, 3, 90, 2, 16, 16, 8, {0, 30, 30, 90}, {17, 0, 59}},
      {"heads_first", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::heads_first},
      {"padded", bf16, 2, 90, 4, 24, 16, 8, {}, {}, Layout::padded_rows},
      {"every_third", f16, 2, 90, 4, 24, 16, 8, {}, {}, Layout::strided_dim},
      {"backwards", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::reversed},
      {"shared", f32, 2, 90, 4, 24, 16, 8, {}, {}, Layout::expanded},
  };
  return all;
}

HostTensor indices(const std::vector<int64_t>& values) {
  HostTensor out = HostTensor::input(DType::i32, {std::ssize(values)});
  for (int64_t n = 0; n < std::ssize(values); ++n) out.set(n, static_cast<double>(values[n]));
  return out;
}

class Pool : public ::testing::TestWithParam<PoolCase> {
 protected:
  Pool() {
    options.block = s.block;
    options.stride = s.stride;
    if (packed()) starts = indices(s.starts), options.cu_seqlens = starts.view();
    if (!s.used.empty()) used = indices(s.used), options.seqused = used.view();
  }
  bool packed() const { return !s.starts.empty(); }
  int64_t rows() const {
    if (packed()) return s.S / s.stride;
    return s.S < s.block ? 0 : (s.S - s.block) / s.stride + 1;
  }
  HostTensor tensor(int64_t rows, bool output) const {
    const std::vector<int64_t> shape = packed() ? std::vector{rows, s.H, s.D} : std::vector{s.B, rows, s.H, s.D};
    const bool read_only = s.layout == Layout::reversed || s.layout == Layout::expanded;
    if (output) return HostTensor::output(s.dtype, shape, read_only ? Layout::contiguous : s.layout);
    HostTensor out = HostTensor::input(s.dtype, shape, s.layout);
    std::mt19937_64 random(5);
    std::normal_distribution<double> normal;
    for (int64_t n = 0; n < out.elements(); ++n) out.set(n, normal(random));
    return out;
  }
  // |found - exact|: `terms` numbers up to `size` are summed and divided in f32, and the result is rounded.
  void expect_near(const HostTensor& found, const std::vector<double>& exact, int64_t terms,
                   const HostTensor& of) const {
    double size = 0;
    for (const double value : of.values()) size = std::max(size, std::abs(value));
    size *= static_cast<double>(terms) / static_cast<double>(s.block);
    const double half_ulp = s.dtype == DType::f32 ? 0x1p-24 : s.dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    const std::vector<double> values = found.values();
    ASSERT_EQ(values.size(), exact.size());
    for (std::size_t n = 0; n < exact.size(); ++n) {
      const double bound = static_cast<double>(terms) * 0x1p-24 * size + half_ulp * std::abs(exact[n]) + 0x1p-25;
      ASSERT_TRUE(std::abs(values[n] - exact[n]) <= bound)
          << "element " << n << ": " << values[n] << ", exact " << exact[n];
      ASSERT_TRUE(exact[n] != 0 || values[n] == 0) << "element " << n << ": " << values[n];
    }
    EXPECT_EQ(found.damage(), "");
  }

  const PoolCase s = GetParam();
  HostTensor starts, used;
  PoolOptions options;
};

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
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0].name, "cpu");
    EXPECT_EQ(list[0].method, "pool");
    EXPECT_TRUE(list[0].chosen);
    EXPECT_EQ(list[0].workspace, 0u);
    EXPECT_NE(list[0].plan, "");
    EXPECT_EQ(list[1].reason, "it runs only when it is asked for");
  }
}

}  // namespace
}  // namespace heddle::kit

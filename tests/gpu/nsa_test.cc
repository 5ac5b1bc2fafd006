// Pooled keys and the choice of blocks on the GPU: the CPU's bits, and lists that the reference's scores allow.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_call.h"
#include "kit/pool_case.h"
#include "kit/select_case.h"
#include "reference/nsa.h"

namespace heddle::kit {
namespace {

using GpuPool = PoolTest;

// Sums of the same numbers in the same order.
TEST_P(GpuPool, HasTheBitsOfTheCpu) {
  const HostTensor x = tensor(s.S, false), d_pooled = tensor(rows(), false);
  HostTensor pooled = tensor(rows(), true), dx = tensor(s.S, true);
  pool_keys(x.view(), pooled.view(), options);
  pool_keys_backward(d_pooled.view(), dx.view(), options);
  const DeviceTensor x_there(x), d_pooled_there(d_pooled), starts_there(starts), used_there(used);
  HostTensor found = tensor(rows(), true), gradient = tensor(s.S, true);
  const DeviceTensor found_there(found), gradient_there(gradient);
  PoolOptions there = options;
  there.cu_seqlens = starts_there.view();
  there.seqused = used_there.view();
  there.force = "cuda";
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  pool_keys(x_there.view(), found_there.view(), there, runtime);
  pool_keys_backward(d_pooled_there.view(), gradient_there.view(), there, runtime);
  stream.synchronize();
  found_there.read(found);
  gradient_there.read(gradient);
  EXPECT_EQ(found.values(), pooled.values());
  EXPECT_EQ(gradient.values(), dx.values());
  EXPECT_EQ(found.damage() + gradient.damage(), "");
}

// As on the CPU: rows of the blocks that end among the last keys, and no other row.
TEST_P(GpuPool, RowsOfNewBlocksAloneAreWritten) {
  if (packed() || s.S < 2) GTEST_SKIP() << "nothing is appended";
  const HostTensor x = tensor(s.S, false);
  const DeviceTensor x_there(x);
  for (const int64_t appended : {int64_t{1}, s.S / 2, s.S}) {
    HostTensor lengths = HostTensor::input(DType::i32, {s.B});
    for (int64_t b = 0; b < s.B; ++b) lengths.set(b, static_cast<double>(std::max<int64_t>(0, s.S - 5 * b)));
    HostTensor expected = tensor(rows(), true), found = tensor(rows(), true);
    PoolOptions of = options;
    of.appended = appended;
    of.seqused = lengths.view();
    extend_pooled_keys(x.view(), expected.view(), of);
    const DeviceTensor found_there(found), lengths_there(lengths);
    of.seqused = lengths_there.view();
    of.force = "cuda";
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    extend_pooled_keys(x_there.view(), found_there.view(), of, runtime);
    stream.synchronize();
    found_there.read(found);
    EXPECT_TRUE(found.same_bits(expected)) << appended << " keys appended";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuPool, ::testing::ValuesIn(pool_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// What is not served is refused in words.
std::vector<SelectCase> gpu_select_cases() {
  std::vector<SelectCase> cases;
  for (SelectCase c : select_cases()) {
    if (c.dtype == DType::f32) c.dtype = c.Hkv % 2 == 0 ? DType::bf16 : DType::f16;
    cases.push_back(c);
  }
  using enum DType;
  cases.push_back({"long", bf16, 1, 16, 1, 300, 300, 128, 16, 16, 0, 0, {}, {4500}, 1, {}, {}, {}, true});
  cases.push_back({"long_without_lse", f16, 1, 3, 1, 100, 300, 64, 33, 16, 0, 0, {}, {4700}});
  cases.push_back({"widest_many", bf16, 1, 4, 2, 90, 200, 192, 100, 16, 0, 0, kNone, {3000}});
  cases.push_back({"group_of_64", bf16, 1, 64, 1, 40, 70, 40, 16, 16, 0, 0, {}, {1000}, 3});
  cases.push_back({"paper_long", bf16, 2, 32, 2, 60, 260, 64, 16, 64, 32, 16, {}, {4100, 900}, 1, {}, {}, {}, true});
  // So few rows that warps share a position's pooled keys.
  cases.push_back({"one_row_lse", bf16, 2, 32, 2, 1, 200, 128, 16, 64, 0, 0, {}, {12799, 6000}, 1, {}, {}, {}, true});
  cases.push_back({"few_rows_lse", f16, 2, 6, 2, 5, 700, 64, 32, 16, 0, 0, kNone, {11000, 900}, 40, {}, {}, {}, true});
  cases.push_back({"few_rows_wide", bf16, 1, 4, 4, 9, 2999, 128, 7, 64, 16, 16, {}, {47900}, 3, {}, {}, {}, true});
  cases.push_back({"few_rows_early", f16, 3, 8, 2, 7, 40, 72, 3, 32, 0, 0, {}, {0, 30, 1000}, 9, {}, {}, {}, true});
  return cases;
}

class GpuSelect : public ::testing::TestWithParam<SelectCase> {
 protected:
  // Served by the GPU's kernel: the largest parts of its refusals.
  static bool expected(const SelectCase& c) {
    const auto l = c.l == 0 ? c.block : c.l, d = c.d == 0 ? l : c.d;
    return c.D % 8 == 0 && c.n <= 128 && 64 % (c.block / d) == 0 && l / d <= 64 &&
           (c.layout == Layout::contiguous || c.layout == Layout::heads_first);
  }
  static std::vector<std::string> served(const SelectData& data, HostTensor& out) {
    const DeviceTensor q(data.q), k(data.k), lse(data.lse), q_offset(data.q_offset), starts_q(data.starts_q),
        starts_k(data.starts_k), used(data.used), blocks(out);
    SelectOptions options = data.options;
    options.q_offset = q_offset.view();
    options.cu_seqlens_q = starts_q.view();
    options.cu_seqlens_k = starts_k.view();
    options.seqused_k = used.view();
    if (data.packed()) options.max_seqlen_q = std::max<std::int64_t>(1, data.s.Sq);
    if (!data.s.starts_k.empty()) options.max_seqlen_k = std::max<std::int64_t>(1, data.s.N);
    std::vector<std::string> refusals;
    for (const Candidate& c : explain_select_blocks(q.view(), k.view(), lse.view(), blocks.view(), options)) {
      if (c.name == "sm80" && !c.supported) refusals.push_back(c.reason);
    }
    if (!refusals.empty()) return refusals;
    options.force = "sm80";
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    select_blocks(q.view(), k.view(), lse.view(), blocks.view(), options, runtime);
    stream.synchronize();
    blocks.read(out);
    return refusals;
  }
};

TEST_P(GpuSelect, ListsTheBlocksOfTheHighestScores) {
  const SelectData data(GetParam());
  HostTensor blocks = data.lists(), again = data.lists();
  const std::vector<std::string> refusals = served(data, blocks);
  ASSERT_EQ(refusals.empty(), expected(GetParam())) << (refusals.empty() ? "served" : refusals.front());
  if (!refusals.empty()) return;
  EXPECT_EQ(blocks.damage(), "");
  served(data, again);
  EXPECT_TRUE(blocks.same_bits(again));
  const SelectProblem p = data.problem(blocks);
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (std::int64_t i = 0; i < s.q_rows; ++i) {
      for (std::int64_t kv_head = 0; kv_head < p.Hkv; ++kv_head) {
        SCOPED_TRACE(text("sequence ", b, ", row ", i, ", head ", kv_head));
        expect_list(p, p.list(b, s, i, kv_head), p.position(s, i), reference::block_scores(p, b, i, kv_head),
                    data.uncertainty(p, b, s, i, kv_head));
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSelect, ::testing::ValuesIn(gpu_select_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Few different keys, so that many blocks have one score: the lower number comes first.
class GpuSelectTies : public GpuSelect {};

TEST_P(GpuSelectTies, TheLowerNumberComesFirst) {
  for (const bool equal : {false, true}) {
    const SelectCase c = GetParam();
    SelectData data(c);
    for (std::int64_t n = 0; n < data.q.elements(); ++n) {
      data.q.set(n, equal ? 0 : static_cast<double>(n / (c.H * c.D) * 5 % 7 + n % c.D) - 3);
    }
    for (std::int64_t n = 0; n < data.k.elements(); ++n) {
      data.k.set(n, n % c.D == n / (c.Hkv * c.D) * 5 % 3 ? 2 : 0);
    }
    HostTensor found = data.lists();
    ASSERT_TRUE(served(data, found).empty());
    EXPECT_EQ(found.values(), data.run("reference").values()) << (equal ? "equal" : "few");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GpuSelectTies,
    ::testing::Values(
        SelectCase{"bf16", DType::bf16, 2, 8, 2, 900, 56, 8, 9, 16, 0, 0, kNone},
        SelectCase{"f16_far", DType::f16, 1, 3, 1, 40, 180, 8, 70, 16, 0, 0, {}, {2850}},
        SelectCase{"few_rows", DType::f16, 2, 8, 2, 9, 200, 8, 9, 16, 0, 0, kNone, {3000, 700}, 5, {}, {}, {}, true},
        SelectCase{"one_slot", DType::bf16, 1, 4, 2, 900, 56, 8, 1, 16, 0, 0, kNone}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

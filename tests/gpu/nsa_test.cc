// Pooled keys and the choice of blocks on the GPU: the CPU's bits, and lists that the reference's scores allow.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
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
  // With lse and whole blocks: every group and head size of Hopper's kernel, several tiles of 128 pooled keys.
  cases.push_back({"tiles_1", bf16, 2, 3, 3, 300, 300, 64, 16, 16, 0, 0, {}, {4500, 20}, 1, {}, {}, {}, true});
  cases.push_back({"tiles_2", f16, 1, 6, 3, 250, 400, 72, 32, 16, 0, 0, kNone, {6000}, 2, {}, {}, {}, true});
  cases.push_back({"tiles_4", bf16, 2, 8, 2, 200, 300, 128, 16, 16, 0, 0, {}, {1000, 4000}, 3, {}, {}, {}, true});
  cases.push_back({"tiles_8", f16, 1, 16, 2, 150, 700, 64, 32, 16, 0, 0, {}, {11000}, 1, {}, {}, {}, true});
  cases.push_back({"tiles_16", bf16, 1, 32, 2, 120, 600, 72, 1, 16, 0, 0, kNone, {9000}, 1, {}, {}, {}, true});
  cases.push_back({"early_16", bf16, 1, 16, 1, 700, 11, 128, 5, 64, 0, 0, {}, {}, 1, {}, {}, {}, true});
  cases.push_back({"rows_far_behind", f16, 1, 8, 2, 9, 1500, 8, 20, 16, 0, 0, {}, {100}, 3000, {}, {}, {}, true});
  cases.push_back(
      {"used_lse", bf16, 3, 8, 2, 60, 300, 64, 9, 16, 0, 0, {}, {4700, 3000, 0}, 1, {}, {}, {0, 140, 300}, true});
  cases.push_back({"packed_tiles",
                   bf16,
                   5,
                   16,
                   1,
                   300,
                   700,
                   40,
                   7,
                   16,
                   0,
                   0,
                   {},
                   {2000, 0, 900, 50, 4700},
                   1,
                   {0, 0, 15, 90, 90, 300},
                   {0, 0, 100, 105, 105, 700},
                   {0, 90, 4, 0, 595},
                   true});
  // Each has more tiles of positions than there are multiprocessors.
  cases.push_back({"rows_6000", bf16, 2, 4, 4, 6000, 4, 8, 3, 16, 0, 0, {}, {}, 1, {}, {}, {}, true});
  cases.push_back({"rows_1000", f16, 3, 16, 1, 1000, 60, 8, 16, 16, 0, 0, {}, {}, 1, {}, {}, {}, true});
  return cases;
}

class GpuSelect : public ::testing::TestWithParam<SelectCase> {
 public:
  static constexpr const char* kCandidates[] = {"sm90", "sm80"};

  // Served by a candidate: the largest parts of its refusals.
  static bool expected(const SelectCase& c, std::string_view candidate) {
    const auto l = c.l == 0 ? c.block : c.l, d = c.d == 0 ? l : c.d, group = c.H / c.Hkv;
    if (c.D % 8 != 0 || (c.layout != Layout::contiguous && c.layout != Layout::heads_first)) return false;
    if (candidate == "sm80") return c.n <= 128 && 64 % (c.block / d) == 0 && l / d <= 64;
    return current_gpu().major == 9 && c.lse && c.D <= 128 && 16 % group == 0 && l == c.block && d == c.block &&
           c.n <= 32 && c.Sq > 8 && c.N > 0;
  }
  static std::vector<std::string> served(const SelectData& data, HostTensor& out, std::string_view candidate) {
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
      if (c.name == candidate && !c.supported) refusals.push_back(c.reason);
    }
    if (!refusals.empty()) return refusals;
    options.force = std::string(candidate);
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
  std::vector<HostTensor> found;
  for (const char* candidate : kCandidates) {
    SCOPED_TRACE(candidate);
    HostTensor blocks = data.lists(), again = data.lists();
    const std::vector<std::string> refusals = served(data, blocks, candidate);
    ASSERT_EQ(refusals.empty(), expected(GetParam(), candidate)) << (refusals.empty() ? "served" : refusals.front());
    if (!refusals.empty()) continue;
    EXPECT_EQ(blocks.damage(), "");
    served(data, again, candidate);
    EXPECT_TRUE(blocks.same_bits(again));
    found.push_back(std::move(blocks));
  }
  if (found.empty()) return;
  const SelectProblem p = data.problem(found.front());
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (std::int64_t i = 0; i < s.q_rows; ++i) {
      for (std::int64_t kv_head = 0; kv_head < p.Hkv; ++kv_head) {
        const std::vector<double> scores = reference::block_scores(p, b, i, kv_head);
        const double uncertainty = data.uncertainty(p, b, s, i, kv_head);
        for (const HostTensor& blocks : found) {
          SCOPED_TRACE(
              text("the ", &blocks - found.data(), "th that serves, sequence ", b, ", row ", i, ", head ", kv_head));
          expect_list(p, data.problem(blocks).list(b, s, i, kv_head), p.position(s, i), scores, uncertainty);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Pooled keys, rows and lse that are NaN: what they have to do with is not listed, and all else is.
TEST(GpuSelectNan, IsNotListed) {
  const SelectCase c{"", DType::bf16, 1, 16, 2, 40, 300, 64, 12, 16, 0, 0, kNone, {4700}, 1, {}, {}, {}, true};
  SelectData data(c);
  const std::int64_t width = c.Hkv * c.D;
  for (const std::int64_t key : {0, 5, 127, 128, 299}) data.k.set(key * width + 3, NAN);  // of the first kv head
  data.q.set(7 * c.H * c.D + 9 * c.D, NAN);                                               // row 7, head 9
  data.lse.set(15 * c.Sq + 9, NAN);                                                       // row 9, head 15
  HostTensor sm80 = data.lists();
  ASSERT_TRUE(GpuSelect::served(data, sm80, "sm80").empty());
  std::vector<HostTensor> found;
  found.push_back(std::move(sm80));
  if (current_gpu().major == 9) {
    HostTensor sm90 = data.lists();
    ASSERT_TRUE(GpuSelect::served(data, sm90, "sm90").empty());
    found.push_back(std::move(sm90));
  }
  for (const HostTensor& blocks : found) {
    for (std::int64_t n = 0; n < c.Sq * c.Hkv * c.n; ++n) {
      const std::int64_t list = n / c.n, row = list / c.Hkv, head = list % c.Hkv;
      const double block = blocks.get(n);
      if (head == 1 && (row == 7 || row == 9)) {
        EXPECT_EQ(block, -1) << n;
        continue;
      }
      EXPECT_GE(block, 0) << n;
      if (head == 0) {
        EXPECT_TRUE(block != 0 && block != 5 && block != 127 && block != 128 && block != 299) << n;
      }
    }
  }
}

// Scores that rise with the block, so that each tile has more candidates than can wait; and that fall.
TEST(GpuSelectOrder, ScoresThatRiseAndFall) {
  for (const std::int64_t group : {1, 2, 4, 8, 16}) {
    for (const bool rise : {true, false}) {
      const SelectCase c{"", DType::f16, 1, group, 1, 20, 900, 8, 32, 16, 0, 0, kNone, {14400}, 1, {}, {}, {}, true};
      SelectData data(c);
      for (std::int64_t n = 0; n < data.q.elements(); ++n) data.q.set(n, n % c.D == 0 ? 1 : 0);
      for (std::int64_t n = 0; n < data.k.elements(); ++n) {
        const std::int64_t key = rise ? n / c.D : c.N - 1 - n / c.D;
        data.k.set(n, n % c.D == 0 ? static_cast<double>(key) / 64 : 0);
      }
      for (std::int64_t n = 0; n < data.lse.elements(); ++n) data.lse.set(n, 3);
      for (const char* candidate : {"sm90", "sm80"}) {
        if (candidate == std::string("sm90") && current_gpu().major != 9) continue;
        HostTensor found = data.lists();
        ASSERT_TRUE(GpuSelect::served(data, found, candidate).empty());
        EXPECT_EQ(found.values(), data.run("reference").values())
            << candidate << ", group " << group << ", rise " << rise;
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
    for (const char* candidate : kCandidates) {
      if (!expected(c, candidate)) continue;
      HostTensor found = data.lists();
      ASSERT_TRUE(served(data, found, candidate).empty());
      EXPECT_EQ(found.values(), data.run("reference").values()) << candidate << (equal ? ", equal" : ", few");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, GpuSelectTies,
    ::testing::Values(
        SelectCase{"bf16", DType::bf16, 2, 8, 2, 900, 56, 8, 9, 16, 0, 0, kNone},
        SelectCase{"f16_far", DType::f16, 1, 3, 1, 40, 180, 8, 70, 16, 0, 0, {}, {2850}},
        SelectCase{"few_rows", DType::f16, 2, 8, 2, 9, 200, 8, 9, 16, 0, 0, kNone, {3000, 700}, 5, {}, {}, {}, true},
        SelectCase{"one_slot", DType::bf16, 1, 4, 2, 900, 56, 8, 1, 16, 0, 0, kNone},
        SelectCase{"lse", DType::bf16, 1, 16, 1, 50, 700, 8, 20, 16, 0, 0, kNone, {11000}, 4, {}, {}, {}, true},
        SelectCase{"lse_2", DType::f16, 2, 4, 2, 90, 300, 72, 32, 16, 0, 0, {}, {4000, 10}, 1, {}, {}, {}, true},
        SelectCase{"lse_1", DType::f16, 1, 2, 2, 90, 300, 8, 7, 16, 0, 0, {}, {4000}, 1, {}, {}, {}, true},
        SelectCase{"lse_4", DType::bf16, 1, 8, 2, 90, 300, 8, 1, 16, 0, 0, kNone, {4000}, 1, {}, {}, {}, true},
        SelectCase{"lse_8", DType::bf16, 1, 8, 1, 90, 300, 128, 31, 16, 0, 0, {}, {4000}, 1, {}, {}, {}, true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

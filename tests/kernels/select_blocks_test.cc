// select_blocks against the reference in doubles: lists exactly where ties are, and by the blocks' scores elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "heddle/nsa.h"
#include "kernels/candidates.h"
#include "kit/host_tensor.h"
#include "ops/nsa/nsa.h"
#include "reference/nsa.h"

namespace heddle::kit {
namespace {

using std::int64_t;

struct SelectCase {
  const char* name;
  DType dtype;
  int64_t B, H, Hkv, Sq, N, D, n;
  int64_t block = 64, l = 0, d = 0;
  ForcedBlocks forced = {};
  std::vector<int64_t> q_offset = {};
  int64_t q_step = 1;
  std::vector<int64_t> starts_q = {}, starts_k = {}, used = {};
  bool lse = false;
  Layout layout = Layout::contiguous;
  float scale = 0;  // 0: not given
};
void PrintTo(const SelectCase& c, std::ostream* out) { *out << c.name; }

constexpr ForcedBlocks kNone{.first = false, .previous = false, .current = false};

const std::vector<SelectCase>& select_cases() {
  using enum DType;
  static const std::vector<SelectCase> all = {
      {"plain", f32, 2, 4, 2, 300, 18, 64, 4, 16},
      {"with_lse", f32, 2, 4, 2, 300, 18, 64, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"bf16", bf16, 1, 8, 2, 700, 43, 128, 8, 16},
      {"f16", f16, 1, 8, 2, 200, 12, 40, 3, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"group_of_1", f32, 1, 3, 3, 200, 12, 32, 5, 16},
      {"group_of_3", bf16, 2, 6, 2, 150, 9, 48, 4, 16, 0, 0, kNone},
      {"group_of_16", f32, 1, 32, 2, 130, 8, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"one_dim", f32, 1, 4, 2, 200, 12, 1, 5, 16, 0, 0, kNone},
      {"odd_dims", f32, 1, 4, 2, 200, 12, 13, 5, 16},
      {"odd_dims_bf16", bf16, 1, 4, 2, 200, 12, 131, 5, 16},
      {"widest", f16, 1, 2, 1, 150, 9, 256, 5, 16},
      {"paper", f32, 1, 4, 1, 700, 42, 32, 6, 64, 32, 16},
      {"paper_with_lse", bf16, 1, 4, 1, 700, 42, 64, 6, 64, 32, 16, kNone, {}, 1, {}, {}, {}, true},
      {"paper_over_tiles", f32, 1, 2, 1, 150, 300, 16, 9, 32, 32, 16, {}, {4700}},
      {"compressed_wider_than_blocks", f32, 1, 2, 1, 500, 59, 16, 5, 16, 40, 8, {}},
      {"far_wider", f32, 1, 2, 1, 300, 260, 16, 5, 16, 500, 4, kNone, {1200}},
      {"strides_of_1", f32, 1, 2, 1, 300, 298, 16, 3, 128, 3, 1, kNone},
      {"smaller_compressed", f32, 2, 4, 2, 300, 37, 24, 3, 64, 8, 8},
      {"offset", f32, 3, 4, 2, 40, 60, 32, 7, 16, 0, 0, {}, {0, 100, 3000}},
      {"step", f32, 2, 4, 2, 70, 60, 32, 7, 16, 0, 0, {}, {3, 0}, 13},
      {"one_row", bf16, 2, 8, 2, 1, 200, 64, 16, 64, 0, 0, {}, {12799, 6000}},
      {"few_rows", f32, 2, 40, 2, 3, 200, 24, 6, 16, 0, 0, {}, {3000, 900}, 50},
      {"few_rows_paper", bf16, 1, 14, 2, 2, 300, 40, 5, 64, 32, 16, kNone, {4000}, 500, {}, {}, {}, true},
      {"many_slots", f32, 1, 4, 2, 200, 12, 32, 40, 16},
      {"one_slot", f32, 1, 4, 2, 200, 12, 32, 1, 16, 0, 0, kNone},
      {"one_slot_forced", f32, 1, 4, 2, 200, 12, 32, 1, 16},
      {"two_slots_forced", f32, 1, 4, 2, 200, 12, 32, 2, 16},
      {"no_slots", f32, 1, 4, 2, 20, 1, 32, 0, 16},
      {"current_alone", f32, 1, 4, 2, 200, 12, 32, 4, 16, 0, 0, {.first = false, .previous = false}},
      {"no_keys", f32, 1, 4, 2, 20, 0, 32, 4, 64},
      {"no_rows", f32, 1, 4, 2, 0, 3, 32, 4, 64},
      {"used", f32, 3, 4, 2, 200, 12, 32, 4, 16, 0, 0, {}, {}, 1, {}, {}, {0, 5, 12}},
      {"packed",
       f32,
       5,
       4,
       2,
       300,
       18,
       32,
       4,
       16,
       0,
       0,
       {},
       {},
       1,
       {0, 0, 15, 90, 90, 300},
       {0, 0, 0, 5, 5, 18},
       {0, 0, 4, 0, 13}},
      {"packed_lse",
       bf16,
       4,
       4,
       1,
       300,
       18,
       64,
       4,
       32,
       32,
       16,
       {},
       {},
       1,
       {0, 100, 131, 180, 300},
       {0, 6, 8, 11, 18},
       {5, 0, 2, 6},
       true},
      {"packed_rows_over_batched_keys", f32, 2, 4, 2, 90, 8, 32, 4, 16, 0, 0, {}, {30, 0}, 2, {0, 50, 90}},
      {"heads_first", f32, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true, Layout::heads_first},
      {"padded", bf16, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true, Layout::padded_rows},
      {"every_third", f16, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::strided_dim},
      {"backwards", f32, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::reversed},
      {"negative_scale",   f32,  1, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false,
       Layout::contiguous, -0.3f},
      {"large_scores", f32, 1, 4, 2, 400, 25, 64, 6, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::contiguous, 3.0f},
  };
  return all;
}

HostTensor indices(const std::vector<int64_t>& values) {
  HostTensor out = HostTensor::input(DType::i32, {std::ssize(values)});
  for (int64_t n = 0; n < std::ssize(values); ++n) out.set(n, static_cast<double>(values[n]));
  return out;
}

struct SelectData {
  explicit SelectData(const SelectCase& spec) : s(spec) {
    const auto shape = [](bool packed, int64_t batch, int64_t rows, int64_t heads, int64_t width) {
      return packed ? std::vector{rows, heads, width} : std::vector{batch, rows, heads, width};
    };
    q = HostTensor::input(s.dtype, shape(packed(), s.B, s.Sq, s.H, s.D), s.layout);
    k = HostTensor::input(s.dtype, shape(!s.starts_k.empty(), s.B, s.N, s.Hkv, s.D), s.layout);
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    for (HostTensor* x : {&q, &k}) {
      for (int64_t n = 0; n < x->elements(); ++n) x->set(n, normal(random));
    }
    if (s.lse) lse = HostTensor::input(DType::f32, packed() ? std::vector{s.H, s.Sq} : std::vector{s.B, s.H, s.Sq});
    options.block_size = s.block;
    options.compression_block = s.l;
    options.compression_stride = s.d;
    options.forced = s.forced;
    options.q_step = s.q_step;
    if (s.scale != 0) options.scale = s.scale;
    const auto give = [&](TensorView& to, HostTensor& from, const std::vector<int64_t>& values) {
      if (!values.empty()) from = indices(values), to = from.view();
    };
    give(options.q_offset, q_offset, s.q_offset);
    give(options.cu_seqlens_q, starts_q, s.starts_q);
    give(options.cu_seqlens_k, starts_k, s.starts_k);
    give(options.seqused_k, used, s.used);
    if (s.lse) fill_lse();
  }
  SelectData(const SelectData&) = delete;  // options are views of its own tensors

  bool packed() const { return !s.starts_q.empty(); }
  HostTensor lists() const {
    return HostTensor::output(DType::i32, packed() ? std::vector{s.Sq, s.Hkv, s.n} : std::vector{s.B, s.Sq, s.Hkv, s.n},
                              s.layout == Layout::heads_first ? Layout::heads_first : Layout::contiguous);
  }
  SelectProblem problem(const HostTensor& blocks) const {
    return checked_select_problem(Check("select_blocks"), q.view(), k.view(), lse.view(), blocks.view(), options);
  }
  HostTensor run(const std::string& candidate, Executor* executor = nullptr) const {
    HostTensor blocks = lists();
    SelectOptions with = options;
    with.force = candidate;
    Runtime runtime;
    runtime.executor = executor;
    WorkspaceBuffer buffer;
    const std::size_t bytes = select_blocks_workspace(q.view(), k.view(), lse.view(), blocks.view(), with, runtime);
    if (bytes > 0) {  // what it held before must not matter
      runtime.workspace = {buffer.get(bytes).data, bytes};
      std::memset(runtime.workspace.data, 0xFF, bytes);
    }
    select_blocks(q.view(), k.view(), lse.view(), blocks.view(), with, runtime);
    EXPECT_EQ(blocks.damage(), "");
    return blocks;
  }
  double dot(const SelectProblem& p, int64_t b, const Sequence& x, int64_t i, int64_t h, int64_t c,
             bool absolute) const {
    double sum = 0;
    for (int64_t n = 0; n < p.D; ++n) {
      const double term = load_element(p.q.at(b, x.q_begin + i, h), p.dtype, n * p.q.stride_d) *
                          load_element(p.key_row(p.k, b, x, c, h / p.G), p.dtype, n * p.k.stride_d);
      sum += absolute ? std::abs(term) : term;
    }
    return sum;
  }

  const SelectCase s;
  HostTensor q, k, lse, q_offset, starts_q, starts_k, used;
  SelectOptions options;

 private:
  void fill_lse() {
    for (int64_t n = 0; n < lse.elements(); ++n) lse.set(n, 0);
    const HostTensor blocks = lists();
    const SelectProblem p = problem(blocks);
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence x = p.sequence(b);
      for (int64_t i = 0; i < x.q_rows; ++i) {
        for (int64_t h = 0; h < p.H; ++h) {
          double sum = 0;
          for (int64_t c = 0; c < p.seen(x, p.position(x, i)); ++c)
            sum += std::exp(p.scale * dot(p, b, x, i, h, c, false));
          p.lse.as<float>()[p.lse.offset(b, h, x.q_begin + i)] = static_cast<float>(std::log(sum));
        }
      }
    }
  }
};

// Whether `list` is right if scores may be off by `relative` of themselves.
void expect_list(const SelectProblem& p, const std::int32_t* list, int64_t t, const std::vector<double>& scores,
                 double relative) {
  const SelectProblem::Forced forced = p.forced_at(t);
  int64_t expected = forced.count;  // entries
  for (int64_t j = 0; j < std::ssize(scores); ++j) expected += !forced.holds(j);
  expected = std::min(expected, p.slots);
  std::set<std::int32_t> listed;
  double before = std::numeric_limits<double>::infinity();
  for (int64_t n = 0; n < p.slots; ++n) {
    if (n >= expected) {
      ASSERT_EQ(list[n], -1) << "slot " << n;
      continue;
    }
    ASSERT_TRUE(listed.insert(list[n]).second) << "slot " << n << " is there twice: " << list[n];
    if (n < forced.count) {
      ASSERT_EQ(list[n], forced.blocks[n]) << "slot " << n;
      continue;
    }
    ASSERT_TRUE(list[n] >= 0 && list[n] < std::ssize(scores)) << "slot " << n << ": " << list[n];
    const double score = scores[list[n]];
    ASSERT_LE(score, before + relative * (score + before)) << "slot " << n;
    before = score;
  }
  if (expected < p.slots || p.slots <= forced.count) return;
  for (int64_t j = 0; j < std::ssize(scores); ++j) {
    if (listed.contains(static_cast<std::int32_t>(j)) || forced.holds(j)) continue;
    ASSERT_LE(scores[j], before + relative * (scores[j] + before)) << "block " << j << " is not listed";
  }
}

class Select : public ::testing::TestWithParam<SelectCase> {};

TEST_P(Select, ListsTheBlocksOfTheHighestScores) {
  const SelectData data(GetParam());
  on_each_target([&] {
    for (const char* candidate : {"cpu", "reference"}) {
      const HostTensor blocks = data.run(candidate);
      const SelectProblem p = data.problem(blocks);
      for (int64_t b = 0; b < p.B; ++b) {
        const Sequence s = p.sequence(b);
        for (int64_t i = 0; i < s.q_rows; ++i) {
          const int64_t t = p.position(s, i);
          for (int64_t kv_head = 0; kv_head < p.Hkv; ++kv_head) {
            // Roundings of D products that are summed, and of lse, which sums over what is seen; both go into an
            // exponent. Then the exponential's own, and sums over heads and pooled keys.
            double size = 0;
            for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) {
              for (int64_t c = 0; c < p.seen(s, t); ++c) size = std::max(size, data.dot(p, b, s, i, h, c, true));
            }
            const double exponent = 2 * static_cast<double>(p.D + 4) * std::abs(p.scale) * size;
            const double steps = exponent + static_cast<double>(s.sk + p.G + p.wide() + p.narrow()) + 32;
            SCOPED_TRACE(text(candidate, ", sequence ", b, ", row ", i, ", head ", kv_head));
            expect_list(p, p.list(b, s, i, kv_head), t, reference::block_scores(p, b, i, kv_head), steps * 0x1p-24);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST_P(Select, ListsDoNotDependOnThreads) {
  const SelectData data(GetParam());
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] { EXPECT_TRUE(data.run("cpu", one.get()).same_bits(data.run("cpu", five.get()))); });
}

INSTANTIATE_TEST_SUITE_P(Cases, Select, ::testing::ValuesIn(select_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Few different keys, so that many blocks have one score: the lower number comes first, as the reference has it.
TEST(SelectTies, TheLowerNumberComesFirst) {
  for (SelectCase c : {SelectCase{"", DType::f32, 1, 1, 1, 900, 56, 8, 9, 16},
                       SelectCase{"", DType::bf16, 2, 8, 2, 900, 56, 8, 9, 16, 0, 0, kNone},
                       SelectCase{"", DType::f16, 1, 3, 1, 40, 180, 5, 70, 16, 0, 0, {}, {2850}},
                       SelectCase{"", DType::f32, 1, 4, 2, 900, 56, 8, 1, 16, 0, 0, kNone}}) {
    for (const bool equal : {false, true}) {
      SelectData data(c);
      for (int64_t n = 0; n < data.q.elements(); ++n) {
        data.q.set(n, equal ? 0 : static_cast<double>(n / (c.H * c.D) * 5 % 7 + n % c.D) - 3);
      }
      for (int64_t n = 0; n < data.k.elements(); ++n) {
        const int64_t key = n / (c.Hkv * c.D) * 5 % 3;
        data.k.set(n, n % c.D == key ? 2 : 0);
      }
      const HostTensor expected = data.run("reference");
      on_each_target(
          [&] { EXPECT_EQ(data.run("cpu").values(), expected.values()) << c.n << (equal ? ", equal" : ""); });
    }
  }
}

// The same where pooled keys overlap blocks: with q = 0 and lse = 0 scores are how often a row's pooled keys count.
TEST(SelectTies, OverlapsAreCounted) {
  for (const auto& [block, l, d, keys] : std::vector<std::array<int64_t, 4>>{{64, 32, 16, 55},
                                                                             {16, 40, 8, 108},
                                                                             {128, 3, 1, 898},
                                                                             {64, 8, 8, 112},
                                                                             {16, 16, 16, 56},
                                                                             {16, 200, 4, 176}}) {
    for (const ForcedBlocks forced : {kNone, ForcedBlocks{}}) {
      const SelectCase c{"", DType::f32, 1, 4, 2, 900, keys, 8, 20, block, l, d, forced, {}, 1, {}, {}, {}, true};
      SelectData data(c);
      for (int64_t n = 0; n < data.q.elements(); ++n) data.q.set(n, 0);
      for (int64_t n = 0; n < data.lse.elements(); ++n) data.lse.set(n, 0);
      const HostTensor expected = data.run("reference");
      on_each_target(
          [&] { EXPECT_EQ(data.run("cpu").values(), expected.values()) << block << ", " << l << ", " << d; });
    }
  }
}

// Its own data and position alone make a row's list.
TEST(SelectInvariance, ARowAloneIsTheRowAmongOthers) {
  for (const bool lse : {false, true}) {
    const SelectData data(
        {"", DType::f32, 2, 8, 2, 150, 180, 40, 12, 16, 32, 16, {}, {2700, 2000}, 1, {}, {}, {}, lse});
    on_each_target([&] {
      const HostTensor all = data.run("cpu");
      for (const int64_t i : {0, 1, 77, 149}) {
        TensorView q = data.q.view(), rows = data.lse.view();
        q.data = static_cast<float*>(q.data) + i * q.stride[1];
        q.shape[1] = 1;
        if (lse) rows.data = static_cast<float*>(rows.data) + i, rows.shape[2] = 1;
        const HostTensor blocks = HostTensor::output(DType::i32, {2, 1, 2, 12}), offset = indices({2700 + i, 2000 + i});
        SelectOptions options = data.options;
        options.q_offset = offset.view();
        WorkspaceBuffer buffer;
        const Runtime runtime{.workspace =
                                  buffer.get(select_blocks_workspace(q, data.k.view(), rows, blocks.view(), options))};
        select_blocks(q, data.k.view(), rows, blocks.view(), options, runtime);
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t n = 0; n < 24; ++n) ASSERT_EQ(blocks.get(b * 24 + n), all.get((b * 150 + i) * 24 + n)) << i;
        }
      }
    });
  }
}

// What a row does not see may hold anything, and a block whose score is NaN is not listed.
TEST(SelectValues, WhatIsNoNumber) {
  SelectData data({"", DType::f32, 1, 4, 2, 200, 12, 32, 12, 16, 0, 0, kNone});
  const HostTensor before = data.run("cpu");
  for (int64_t n = 8 * 64; n < data.k.elements(); ++n) data.k.set(n, std::numeric_limits<double>::quiet_NaN());
  on_each_target([&] {
    const HostTensor blocks = data.run("cpu");
    for (int64_t i = 0; i < 200; ++i) {
      for (int64_t n = 0; n < 24; ++n) {
        const double found = blocks.get(i * 24 + n);
        ASSERT_EQ(found, i < 143 ? before.get(i * 24 + n) : -1) << i;  // from 143 on lse is NaN, and so are all scores
      }
    }
  });
}

TEST(SelectChoice, ListsWhatThereIs) {
  const SelectData data(select_cases()[0]);
  const HostTensor blocks = data.lists();
  const auto list = explain_select_blocks(data.q.view(), data.k.view(), {}, blocks.view(), data.options);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].name, "cpu");
  EXPECT_EQ(list[0].method, "select");
  EXPECT_TRUE(list[0].chosen);
  EXPECT_GT(list[0].workspace, 0u);
  EXPECT_NE(list[0].plan.find("two products"), std::string::npos) << list[0].plan;
  EXPECT_EQ(list[1].reason, "it runs only when it is asked for");
}

// Lists without entries need no memory, not even workspace.
TEST(SelectSlots, MayBeNone) {
  const SelectData data(select_cases()[0]);
  select_blocks(data.q.view(), data.k.view(), {}, TensorView(nullptr, DType::i32, {2, 300, 2, 0}), data.options, {});
}

// Workspace does not grow with lengths.
TEST(SelectWorkspace, IsBounded) {
  const auto bytes = [](int64_t rows, int64_t keys) {
    TensorView q({}, DType::f32, {1, rows, 8, 128}), k({}, DType::f32, {1, keys, 2, 128});
    const TensorView blocks({}, DType::i32, {1, rows, 2, 16});
    const std::unique_ptr<Executor> one = make_thread_pool(1);
    Runtime runtime;
    runtime.executor = one.get();
    return select_blocks_workspace(q, k, {}, blocks, {}, runtime);
  };
  EXPECT_EQ(bytes(4096, 64), bytes(1 << 20, 1 << 14));
  EXPECT_LT(bytes(1 << 20, 1 << 14), std::size_t{1} << 20);
}

}  // namespace
}  // namespace heddle::kit

// select_blocks against the reference in doubles: lists exactly where ties are, and by the blocks' scores elsewhere.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <vector>

#include "heddle/nsa.h"
#include "kernels/candidates.h"
#include "kernels/elsewhere.h"
#include "kit/select_case.h"

namespace heddle::kit {
namespace {

using std::int64_t;

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
            SCOPED_TRACE(text(candidate, ", sequence ", b, ", row ", i, ", head ", kv_head));
            expect_list(p, p.list(b, s, i, kv_head), t, reference::block_scores(p, b, i, kv_head),
                        data.uncertainty(p, b, s, i, kv_head));
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
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(list[0].name, "cpu");
  EXPECT_EQ(list[0].method, "select");
  EXPECT_TRUE(list[0].chosen);
  EXPECT_GT(list[0].workspace, 0u);
  EXPECT_NE(list[0].plan.find("two products"), std::string::npos) << list[0].plan;
  EXPECT_EQ(list[1].reason, "it runs only when it is asked for");
  EXPECT_EQ(list[2].name, "sm90");
  EXPECT_EQ(list[3].name, "sm80");
  EXPECT_EQ(list[3].reason, refusal_of_cpu_tensors());
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

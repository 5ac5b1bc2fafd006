// Attention over lists of key blocks: what a mask of the same pairs gives, by the reference to the bit, by kernels by
// the rule that judges all of them; and bits that nothing but a row's own list changes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "heddle/sparse.h"
#include "kernels/candidates.h"
#include "kit/sparse_case.h"
#include "reference/attention.h"

namespace heddle::kit {
namespace {

ForwardOutputs run(const CaseData& data, const BlockLists& lists, const char* candidate, Executor* executor = nullptr) {
  ForwardOutputs out = run_sparse(data, lists, candidate, executor);
  EXPECT_EQ(out.o.damage(), "");
  EXPECT_EQ(out.lse.damage(), "");
  return out;
}

Gradients run_backward(const CaseData& data, const BlockLists& lists, const ForwardOutputs& after,
                       Executor* executor = nullptr) {
  return run_sparse_backward(data, lists, after.o, after.lse, "cpu", executor).gradients;
}

class Sparse : public ::testing::TestWithParam<SparseCase> {};

TEST_P(Sparse, IsAttentionUnderTheMaskThatSaysTheSame) {
  SparseRunner runner(GetParam());
  const reference::Forward listed = reference::attention_forward(runner.problem(), default_executor());
  EXPECT_EQ(listed.o, runner.forward().o);
  EXPECT_EQ(listed.lse, runner.forward().lse);
  EXPECT_EQ(runner.blind_spots(Pass::forward), "");
  on_each_target([&] {
    const CaseResult found = runner.check(Pass::forward, "cpu");
    EXPECT_TRUE(found.passed) << found.message();
  });
}

TEST_P(Sparse, HasTheGradientsOfAttentionUnderTheMask) {
  if (!GetParam().call.has_backward()) GTEST_SKIP() << "attention has none";
  SparseRunner runner(GetParam());
  const Gradients none = runner.data.new_gradients();
  const reference::Backward listed = reference::attention_backward(runner.backward_problem(none), default_executor());
  const reference::Backward& expected = runner.backward();
  EXPECT_EQ(listed.dq, expected.dq);
  EXPECT_EQ(listed.dk, expected.dk);
  EXPECT_EQ(listed.dv, expected.dv);
  EXPECT_EQ(listed.dsink, expected.dsink);
  EXPECT_EQ(runner.blind_spots(Pass::backward), "");
  if (!GetParam().has_gradients()) return;
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] {
    const CaseResult found = runner.check(Pass::backward, "cpu", one.get());
    EXPECT_TRUE(found.passed) << found.message();
    const ForwardOutputs& after = runner.rounded_forward();
    const Gradients once = run_backward(runner.data, runner.lists.views, after, one.get()),
                    again = run_backward(runner.data, runner.lists.views, after, five.get());
    EXPECT_TRUE(once.dq.same_bits(again.dq) && once.dk.same_bits(again.dk) && once.dv.same_bits(again.dv))
        << "other bits with other threads";
  });
}

TEST_P(Sparse, BitsDoNotDependOnThreadsOrOnTheOrderOfAList) {
  CaseData data(GetParam().call);
  const CaseLists lists(data, GetParam().lists);
  const std::int64_t entries = GetParam().lists.entries;
  HostTensor backwards = lists.blocks;
  for (std::int64_t k = 0; k < backwards.elements(); ++k) {
    backwards.set(k, lists.blocks.get(k / entries * entries + entries - 1 - k % entries));
  }
  BlockLists other = lists.views;
  other.blocks = backwards.view();
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] {
    const ForwardOutputs first = run(data, lists.views, "cpu", one.get()),
                         second = run(data, lists.views, "cpu", five.get());
    EXPECT_TRUE(first.o.same_bits(second.o));
    EXPECT_TRUE(first.lse.same_bits(second.lse));
    if (lists.counts.given() || lists.masks.given()) return;  // then the first entries are others
    const ForwardOutputs third = run(data, other, "cpu", one.get());
    EXPECT_TRUE(first.o.same_bits(third.o));
    EXPECT_TRUE(first.lse.same_bits(third.lse));
  });
}

TEST_P(Sparse, ListsMayLieOneBehindTheOther) {
  SparseRunner runner(GetParam());
  const CsrLists csr(runner.lists);
  const auto o = [&](const BlockLists& lists) { return run(runner.data, lists, "reference").o; };
  EXPECT_TRUE(o(csr.views).same_bits(o(runner.lists.views)));
  on_each_target([&] {
    const ForwardOutputs listed = run(runner.data, runner.lists.views, "cpu"),
                         found = run(runner.data, csr.views, "cpu");
    EXPECT_TRUE(found.o.same_bits(listed.o) && found.lse.same_bits(listed.lse));
    if (!GetParam().has_gradients()) return;
    const Gradients expected = run_backward(runner.data, runner.lists.views, listed),
                    gradients = run_backward(runner.data, csr.views, listed);
    EXPECT_TRUE(gradients.dq.same_bits(expected.dq) && gradients.dk.same_bits(expected.dk) &&
                gradients.dv.same_bits(expected.dv));
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Sparse, ::testing::ValuesIn(sparse_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// A row's bits are its own: the same row alone, in another place of another batch, with other neighbours' lists.
TEST(SparseInvariance, ARowAloneIsTheRowAmongOthers) {
  CaseData data(sparse_call(DType::bf16, 2, 8, 2, 150, 400, 64));
  const CaseLists lists(data, {.block_size = 32, .units = 2, .entries = 5});
  on_each_target([&] {
    const ForwardOutputs all = run(data, lists.views, "cpu");
    for (const std::int64_t i : {0, 1, 77, 149}) {
      TensorView q = data.q.view(), blocks = lists.blocks.view();
      q.data = static_cast<std::byte*>(q.data) + static_cast<std::int64_t>(size_of(q.dtype)) * i * q.stride[1];
      blocks.data = static_cast<std::int32_t*>(blocks.data) + i * blocks.stride[1];
      q.shape[1] = blocks.shape[1] = 1;
      HostTensor o = HostTensor::output(DType::bf16, {2, 1, 8, 64});
      BlockLists own = lists.views;
      own.blocks = blocks;
      WorkspaceBuffer buffer;
      AttentionOptions options;
      options.force = "cpu";
      const Runtime runtime{
          .workspace = buffer.get(sparse_attention_forward_workspace(q, data.k.view(), data.v.view(), own, options))};
      sparse_attention_forward(q, data.k.view(), data.v.view(), own, o.view(), {}, options, runtime);
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t n = 0; n < 8 * 64; ++n) {
          ASSERT_EQ(o.get(b * 512 + n), all.o.get((b * 150 + i) * 512 + n)) << "row " << i << ", element " << n;
        }
      }
    }
  });
}

// Gradients are added to what is there, each element once.
TEST(SparseGradients, AreAddedToWhatIsThere) {
  CaseData data(sparse_call(DType::f32, 2, 4, 2, 70, 150, 32, [](auto& c) { c.causal = Causal::bottom_right; }));
  const CaseLists lists(data, {.block_size = 32, .units = 2, .entries = 4});
  on_each_target([&] {
    const ForwardOutputs out = run(data, lists.views, "cpu");
    const Gradients once = run_backward(data, lists.views, out);
    Gradients sums = data.new_gradients();
    HostTensor* const all[] = {&sums.dq, &sums.dk, &sums.dv};
    const HostTensor* const own[] = {&once.dq, &once.dk, &once.dv};
    for (HostTensor* x : all) {
      for (std::int64_t n = 0; n < x->elements(); ++n) x->set(n, static_cast<double>(n % 7));
    }
    AttentionGradients views = sums.views();
    views.accumulate = true;
    const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
    const AttentionOptions options = sparse_options(data, "cpu");
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(sparse_attention_backward_workspace(q, k, v, lists.views, views, options));
    sparse_attention_backward(q, k, v, lists.views, out.o.view(), out.lse.view(), data.d_o.view(), data.d_lse.view(),
                              views, options, runtime);
    for (int t = 0; t < 3; ++t) {
      for (std::int64_t n = 0; n < all[t]->elements(); ++n) {
        const float before = static_cast<float>(n % 7), added = static_cast<float>(own[t]->get(n));
        ASSERT_EQ(static_cast<float>(all[t]->get(n)), before + added) << "tensor " << t << ", element " << n;
      }
    }
  });
}

// Entries that name nothing say nothing, however far off they are.
TEST(SparseEntries, MayBeAnything) {
  CaseData data(sparse_call(DType::f32, 2, 4, 2, 50, 120, 32));
  CaseLists lists(data, {.units = 2, .entries = 6, .counts = true});
  for (std::int64_t k = 0; k < lists.counts.elements(); ++k) lists.counts.set(k, k % 2 == 0 ? 6 : 2147483647.0);
  constexpr double kWild[] = {-2147483648.0, -17, 2147483647.0, 8, 1e9};
  CaseLists plain = lists;
  for (std::int64_t k = 0; k < lists.blocks.elements(); ++k) {
    const double wild = kWild[k % 5];
    if (k % 6 < 3) {
      lists.blocks.set(k, wild);
      plain.blocks.set(k, -1);
    }
  }
  plain.views.blocks = plain.blocks.view();
  plain.views.counts = {};
  on_each_target([&] {
    const ForwardOutputs out = run(data, lists.views, "cpu"), expected = run(data, plain.views, "cpu");
    EXPECT_TRUE(out.o.same_bits(expected.o));
    const Gradients found = run_backward(data, lists.views, out), other = run_backward(data, plain.views, out);
    EXPECT_TRUE(found.dq.same_bits(other.dq) && found.dk.same_bits(other.dk) && found.dv.same_bits(other.dv));
  });
}

// Offsets that fall, or lead out of the entries.
TEST(SparseEntries, OffsetsStayWithinTheEntries) {
  CaseData data(sparse_call(DType::f32, 1, 2, 1, 4, 120, 32));
  HostTensor blocks = HostTensor::input(DType::i32, {5}), offsets = HostTensor::input(DType::i32, {1, 1, 5});
  for (std::int64_t k = 0; k < 5; ++k) blocks.set(k, static_cast<double>(k));
  constexpr double kWild[] = {-2147483648.0, 2, 1, 2147483647.0, 3};
  for (std::int64_t k = 0; k < 5; ++k) offsets.set(k, kWild[k]);
  const BlockLists wild{.blocks = blocks.view(), .counts = {}, .offsets = offsets.view(), .block_size = 32};
  // Row by row: [0, 2), [2, 2), [1, 5), [5, 5).
  HostTensor same = HostTensor::input(DType::i32, {1, 4, 1, 4});
  constexpr double kSame[] = {0, 1, -1, -1, -1, -1, -1, -1, 1, 2, 3, 4, -1, -1, -1, -1};
  for (std::int64_t k = 0; k < 16; ++k) same.set(k, kSame[k]);
  const BlockLists tame{.blocks = same.view(), .counts = {}, .offsets = {}, .block_size = 32};
  on_each_target([&] {
    const ForwardOutputs out = run(data, wild, "cpu"), expected = run(data, tame, "cpu");
    EXPECT_TRUE(out.o.same_bits(expected.o) && out.lse.same_bits(expected.lse));
  });
}

// Values that no list names may hold anything.
TEST(SparseValues, WhatNobodyListsIsNotReadIntoARow) {
  CaseData data(sparse_call(DType::f32, 1, 2, 1, 40, 256, 32));
  CaseLists lists(data, {.block_size = 64, .entries = 2});
  for (std::int64_t k = 0; k < lists.blocks.elements(); ++k) lists.blocks.set(k, k % 2 == 0 ? 0 : 2);
  for (std::int64_t j = 0; j < 256; ++j) {
    if (j / 64 % 2 == 0) continue;
    for (std::int64_t d = 0; d < 32; ++d) {
      data.k.set(j * 32 + d, std::numeric_limits<double>::quiet_NaN());
      data.v.set(j * 32 + d, std::numeric_limits<double>::infinity());
    }
  }
  on_each_target([&] {
    const ForwardOutputs out = run(data, lists.views, "cpu");
    for (const double value : out.o.values()) ASSERT_TRUE(std::isfinite(value));
  });
}

// Nor those of listed blocks that a mask keeps from every row, forward and backward.
TEST(SparseValues, WhatAMaskRemovesIsNotReadIntoARow) {
  CaseData data(sparse_call(DType::f32, 1, 2, 1, 40, 128, 32));
  CaseLists lists(data, {.block_size = 64, .query_rows = 8, .entries = 2, .masks = 1});
  for (std::int64_t k = 0; k < lists.blocks.elements(); ++k) lists.blocks.set(k, k % 2), lists.mask_ids.set(k, 0);
  for (std::int64_t k = 0; k < lists.masks.elements(); ++k) lists.masks.set(k, 0x0000ffff);
  for (std::int64_t j = 0; j < 128; ++j) {
    if (j % 32 < 16) continue;
    for (std::int64_t d = 0; d < 32; ++d) {
      data.k.set(j * 32 + d, std::numeric_limits<double>::quiet_NaN());
      data.v.set(j * 32 + d, std::numeric_limits<double>::infinity());
    }
  }
  on_each_target([&] {
    const ForwardOutputs out = run(data, lists.views, "cpu");
    const Gradients gradients = run_backward(data, lists.views, out);
    for (const HostTensor* x : {&out.o, &gradients.dq, &gradients.dk, &gradients.dv}) {
      for (const double value : x->values()) ASSERT_TRUE(std::isfinite(value));
    }
  });
}

// Rows of tiles without masks have the bits of lists without any.
TEST(SparseMasks, OfAllPairsChangeNoBit) {
  CaseData data(sparse_call(DType::bf16, 2, 4, 2, 90, 200, 32, [](auto& c) { c.causal = Causal::bottom_right; }));
  CaseLists lists(data, {.block_size = 32, .query_rows = 4, .units = 2, .entries = 4, .masks = 2});
  for (std::int64_t k = 0; k < lists.mask_ids.elements(); ++k) lists.mask_ids.set(k, k % 3 == 0 ? 1 : -1);
  BlockLists whole = lists.views;
  whole.masks = whole.mask_ids = {};
  on_each_target([&] {
    const ForwardOutputs out = run(data, lists.views, "cpu"), expected = run(data, whole, "cpu");
    EXPECT_TRUE(out.o.same_bits(expected.o) && out.lse.same_bits(expected.lse));
    const Gradients found = run_backward(data, lists.views, out), other = run_backward(data, whole, out);
    EXPECT_TRUE(found.dq.same_bits(other.dq) && found.dk.same_bits(other.dk) && found.dv.same_bits(other.dv));
  });
}

// Not one: no entry with a mask lets anything through, and what it points at is not read.
TEST(SparseMasks, MayBeNone) {
  CaseData data(sparse_call(DType::f32, 1, 2, 1, 40, 128, 32));
  CaseLists lists(data, {.block_size = 64, .query_rows = 8, .entries = 2, .masks = 1});
  for (std::int64_t k = 0; k < lists.blocks.elements(); ++k) lists.blocks.set(k, k % 2);
  for (std::int64_t k = 0; k < lists.mask_ids.elements(); ++k) lists.mask_ids.set(k, k % 2 == 0 ? -1 : k);
  CaseLists first = lists;
  for (std::int64_t k = 1; k < first.blocks.elements(); k += 2) first.blocks.set(k, -1);
  first.views.blocks = first.blocks.view();
  first.views.masks = first.views.mask_ids = {};
  BlockLists none = lists.views;
  none.masks = TensorView(nullptr, DType::i32, {0, 8, 2});
  on_each_target([&] {
    const ForwardOutputs out = run(data, none, "cpu"), expected = run(data, first.views, "cpu");
    EXPECT_TRUE(out.o.same_bits(expected.o) && out.lse.same_bits(expected.lse));
  });
}

struct Refused {
  const char* name;
  void (*spoil)(BlockLists&, AttentionOptions&);
  const char* message;
};

class SparseRefuses : public ::testing::TestWithParam<Refused> {};

TEST_P(SparseRefuses, InWords) {
  std::vector<float> x(2 * 6 * 4 * 8, 0.5f), out(2 * 6 * 4 * 8, -7.0f);
  std::vector<std::int32_t> entries(2 * 6 * 4 * 3), counts(2 * 6 * 4);
  const TensorView q(x.data(), DType::f32, {2, 6, 4, 8}), k(x.data(), DType::f32, {2, 6, 2, 8});
  const TensorView o(out.data(), DType::f32, {2, 6, 4, 8});
  BlockLists lists{.blocks = TensorView(entries.data(), DType::i32, {2, 6, 2, 3}),
                   .counts = TensorView(counts.data(), DType::i32, {2, 6, 2}),
                   .offsets = {}};
  AttentionOptions options;
  GetParam().spoil(lists, options);
  try {
    WorkspaceBuffer buffer;
    sparse_attention_forward(q, k, k, lists, o, {}, options, {.workspace = buffer.get(1 << 20)});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), std::string("[sparse_attention_forward] ") + GetParam().message);
  }
  for (const float value : out) ASSERT_EQ(value, -7.0f);
}

INSTANTIATE_TEST_SUITE_P(
    Sparse, SparseRefuses,
    ::testing::Values(
        Refused{"missing", [](BlockLists& l, AttentionOptions&) { l.blocks = {}; }, "blocks is missing"},
        Refused{"dtype", [](BlockLists& l, AttentionOptions&) { l.blocks.dtype = DType::f32; },
                "blocks is float32: it must be int32"},
        Refused{"lists", [](BlockLists& l, AttentionOptions&) { l.blocks.shape[1] = 5; },
                "blocks is [2, 5, 2, 3]: it must be [2, 6, L, n], a list for each row of q"},
        Refused{"lists_of_rows", [](BlockLists& l, AttentionOptions&) { l.query_rows = 4; },
                "blocks is [2, 6, 2, 3]: it must be [2, 2, L, n], a list for each 4 rows of q"},
        Refused{"units", [](BlockLists& l, AttentionOptions&) { l.blocks.shape[2] = 3; },
                "blocks is [2, 6, 3, 3]: it has lists for 3 heads and must have them for 1, for each of 2 key/value "
                "heads or for each of 4 query heads"},
        Refused{"block_size", [](BlockLists& l, AttentionOptions&) { l.block_size = 48; },
                "block_size is 48: it must be 16, 32, 64 or 128"},
        Refused{"query_rows", [](BlockLists& l, AttentionOptions&) { l.query_rows = 0; },
                "query_rows is 0: it must be from 1 to 1048576"},
        Refused{"counts", [](BlockLists& l, AttentionOptions&) { l.counts.shape[2] = 1; },
                "counts is [2, 6, 1]: it must be a number for each list of blocks, [2, 6, 2, 3]"},
        Refused{"counts_and_offsets", [](BlockLists& l, AttentionOptions&) { l.offsets = l.counts; },
                "counts is given beside offsets, which say how long each list is"},
        Refused{"offsets",
                [](BlockLists& l, AttentionOptions&) {
                  l.offsets = l.counts, l.counts = {}, l.blocks.rank = 1, l.blocks.stride[0] = 1;
                },
                "offsets is [2, 6, 2]: it must be [2, L, 7], where each list begins, one for each row of q, and where "
                "the last one ends"},
        Refused{"blocks_beside_offsets", [](BlockLists& l, AttentionOptions&) { l.offsets = l.counts, l.counts = {}; },
                "blocks has 4 dimensions: it must have 1; found blocks [2, 6, 2, 3]"},
        Refused{"stride", [](BlockLists& l, AttentionOptions&) { l.blocks.stride[3] = 2; },
                "blocks must have contiguous entries: the last stride is 2"},
        Refused{"device", [](BlockLists& l, AttentionOptions&) { l.blocks.device = Device::cuda; },
                "blocks is on another device than q"},
        Refused{"method", [](BlockLists&, AttentionOptions& o) { o.method = "flash"; },
                "method is 'flash': attention over lists has one; leave it empty, or name a candidate as force"},
        Refused{"key_step", [](BlockLists&, AttentionOptions& o) { o.key_step = 16; },
                "key_step is 16: it must be 1, as lists name blocks of single keys"},
        Refused{"precision", [](BlockLists&, AttentionOptions& o) { o.precision = Precision::tf32; },
                "precision is not f32: attention over lists has no other"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

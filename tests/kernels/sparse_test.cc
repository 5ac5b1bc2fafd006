// Attention over lists of key blocks: what a mask of the same pairs gives, by the reference to the bit, by kernels by
// the rule that judges all of them; and bits that nothing but a row's own list changes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heddle/sparse.h"
#include "kernels/candidates.h"
#include "kit/block_lists.h"
#include "kit/case_rows.h"
#include "kit/yardstick.h"
#include "ops/sparse.h"
#include "reference/attention.h"

namespace heddle::kit {
namespace {

struct SparseCase {
  const char* name;
  ListShape lists;
  AttentionCase call;
};

AttentionCase call(DType dtype, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq, std::int64_t Sk,
                   std::int64_t D, void (*change)(AttentionCase&) = nullptr) {
  AttentionCase c{.name = "sparse", .dtype = dtype, .B = B, .H = H, .Hkv = Hkv, .Sq = Sq, .Sk = Sk, .D = D, .Dv = D};
  if (change != nullptr) change(c);
  c.mask = kFull;
  return c;
}

const std::vector<SparseCase>& cases() {
  using enum DType;
  static const std::vector<SparseCase> all = {
      {"plain", {.entries = 4}, call(f32, 2, 4, 2, 70, 150, 32)},
      {"causal",
       {.block_size = 32, .units = 2, .entries = 5},
       call(f32, 1, 8, 2, 200, 200, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"causal_16_bits",
       {.block_size = 64, .units = 2, .entries = 4},
       call(bf16, 1, 8, 2, 300, 300, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"half",
       {.block_size = 64, .entries = 3, .counts = true},
       call(f16, 2, 3, 3, 90, 333, 40, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"list_for_each_head", {.units = 6, .entries = 3, .counts = true}, call(f32, 2, 6, 2, 33, 120, 16)},
      {"one_list", {.block_size = 128, .units = 1, .entries = 2}, call(bf16, 1, 10, 2, 65, 700, 128)},
      {"rows_share", {.query_rows = 16, .units = 2, .entries = 3}, call(f32, 2, 4, 2, 75, 130, 24)},
      {"sink",
       {.units = 2, .entries = 2, .counts = true},
       call(f32, 2, 4, 2, 40, 90, 32, [](auto& c) { c.sink = true; })},
      {"window",
       {.entries = 6},
       call(f32, 2, 2, 2, 100, 140, 32, [](auto& c) { c.window_left = 50, c.window_right = 20; })},
      {"alibi_softcap",
       {.units = 2, .entries = 4},
       call(f32, 2, 4, 2, 60, 100, 32, [](auto& c) { c.alibi = Alibi::per_head, c.softcap = 7.0f; })},
      {"packed",
       {.units = 2, .entries = 3, .counts = true},
       call(f32, 5, 4, 2, 60, 90, 32,
            [](auto& c) {
              c.packed_q = c.packed_k = true;
              c.causal = Causal::bottom_right;
            })},
      {"packed_rows_share",
       {.query_rows = 8, .units = 2, .entries = 3},
       call(bf16, 5, 4, 2, 60, 90, 32, [](auto& c) { c.packed_q = c.packed_k = true; })},
      {"used", {.entries = 3}, call(f32, 4, 2, 1, 50, 80, 32, [](auto& c) { c.seqused_q = c.seqused_k = true; })},
      {"paged",
       {.units = 2, .entries = 4},
       call(bf16, 3, 4, 2, 5, 96, 32,
            [](auto& c) { c.page_size = 16, c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"one_row",
       {.block_size = 64, .units = 2, .entries = 5},
       call(f32, 2, 8, 2, 1, 600, 64, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"group_of_5",
       {.block_size = 32, .units = 3, .entries = 3},
       call(f32, 1, 15, 3, 77, 140, 48, [](auto& c) { c.Dv = 20; })},
      {"float32_out",
       {.units = 2, .entries = 3},
       call(bf16, 2, 4, 2, 40, 90, 32, [](auto& c) { c.float32_out = true; })},
      {"piece",
       {.units = 2, .entries = 4},
       call(f32, 3, 4, 2, 50, 75, 32,
            [](auto& c) { c.q_offset = c.key_offset = true, c.causal = Causal::top_left, c.window_left = 60; })},
      {"cache_rows",
       {.units = 2, .entries = 4},
       call(f16, 3, 4, 2, 7, 96, 32, [](auto& c) { c.cache_batch_idx = c.seqused_k = c.leftpad = true; })},
      {"no_entries", {.entries = 0}, call(f32, 1, 2, 1, 9, 40, 16)},
  };  // fmt: skip
  return all;
}

// The case's options without the mask, which the lists say in its place.
AttentionOptions options_of(const CaseData& data, const char* candidate = "") {
  AttentionOptions options = data.options();
  options.mask = {};
  options.force = candidate;
  return options;
}

struct Outputs {
  HostTensor o, lse;
};

Outputs run(const CaseData& data, const BlockLists& lists, const char* candidate, Executor* executor = nullptr) {
  Outputs out{data.new_o(), data.new_lse()};
  const AttentionOptions options = options_of(data, candidate);
  Runtime runtime;
  runtime.executor = executor;
  WorkspaceBuffer buffer;
  const std::size_t bytes =
      sparse_attention_forward_workspace(data.q.view(), data.k.view(), data.v.view(), lists, options, runtime);
  if (bytes > 0) {
    runtime.workspace = {buffer.get(bytes).data, bytes};
    std::memset(runtime.workspace.data, 0xFF, bytes);
  }
  sparse_attention_forward(data.q.view(), data.k.view(), data.v.view(), lists, out.o.view(), out.lse.view(), options,
                           runtime);
  EXPECT_EQ(out.o.damage(), "");
  EXPECT_EQ(out.lse.damage(), "");
  return out;
}

// After a forward that wrote o and lse.
Gradients run_backward(const CaseData& data, const BlockLists& lists, const HostTensor& o, const HostTensor& lse,
                       const char* candidate, Executor* executor = nullptr) {
  Gradients out = data.new_gradients();
  const AttentionOptions options = options_of(data, candidate);
  Runtime runtime;
  runtime.executor = executor;
  WorkspaceBuffer buffer;
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  const std::size_t bytes = sparse_attention_backward_workspace(q, k, v, lists, out.views(), options, runtime);
  if (bytes > 0) {
    runtime.workspace = {buffer.get(bytes).data, bytes};
    std::memset(runtime.workspace.data, 0xFF, bytes);
  }
  sparse_attention_backward(q, k, v, lists, o.view(), lse.view(), data.d_o.view(), data.d_lse.view(), out.views(),
                            options, runtime);
  for (const HostTensor* x : {&out.dq, &out.dk, &out.dv, &out.dsink}) {
    if (!x->given()) continue;
    EXPECT_EQ(x->damage(), "");
  }
  return out;
}

void judge(const char* name, const HostTensor& out, const std::vector<double>& reference, const PlainTensor& plain,
           double factor) {
  if (!out.given()) return;
  const TensorView& view = out.view();
  const Comparison found = compare(name, out.values(), reference, plain,
                                   {view.shape.begin(), view.shape.begin() + view.rank}, view.dtype, factor);
  EXPECT_TRUE(found.passed) << name << ": " << found.error << " of " << found.bound << ", " << found.worst;
}

bool has_gradients(const AttentionCase& call) {
  return call.has_backward() && call.alibi == Alibi::none && call.softcap == 0;
}

class Sparse : public ::testing::TestWithParam<SparseCase> {};

TEST_P(Sparse, IsAttentionUnderTheMaskThatSaysTheSame) {
  CaseData data(GetParam().call);
  const CaseLists lists(data, GetParam().lists);
  lists.write_mask(data);
  const AttentionProblem masked = data.problem();
  const reference::Forward expected = reference::attention_forward(masked, default_executor());

  const Outputs none{data.new_o(), data.new_lse()};
  const SparseProblem problem =
      checked_sparse_problem(Check("sparse_attention_forward"), data.q.view(), data.k.view(), data.v.view(),
                             lists.views, none.o.view(), none.lse.view(), options_of(data));
  const reference::Forward listed = reference::attention_forward(problem, default_executor());
  EXPECT_EQ(listed.o, expected.o);
  EXPECT_EQ(listed.lse, expected.lse);

  const PlainForward plain = plain_forward(masked);
  const double factor = allowed_factor(masked, expected);
  on_each_target([&] {
    const Outputs out = run(data, lists.views, "cpu");
    judge("o", out.o, expected.o, plain.o, factor);
    judge("lse", out.lse, expected.lse, plain.lse, factor);
  });
}

TEST_P(Sparse, HasTheGradientsOfAttentionUnderTheMask) {
  CaseData data(GetParam().call);
  if (!data.spec.has_backward()) GTEST_SKIP() << "attention has none";
  const CaseLists lists(data, GetParam().lists);
  lists.write_mask(data);
  const Gradients none = data.new_gradients();
  const AttentionBackwardProblem masked = data.backward_problem(none);
  const reference::Forward forward = reference::attention_forward(masked, default_executor());
  const reference::Backward expected = reference::attention_backward(masked, default_executor());
  Outputs after{data.new_o(), data.new_lse()};
  for (std::size_t n = 0; n < forward.o.size(); ++n) after.o.set(static_cast<std::int64_t>(n), forward.o[n]);
  for (std::size_t n = 0; n < forward.lse.size(); ++n) after.lse.set(static_cast<std::int64_t>(n), forward.lse[n]);

  const SparseBackwardProblem problem = checked_sparse_backward_problem(
      Check("sparse_attention_backward"), data.q.view(), data.k.view(), data.v.view(), lists.views, after.o.view(),
      after.lse.view(), data.d_o.view(), data.d_lse.view(), none.views(), options_of(data));
  const reference::Backward listed = reference::attention_backward(problem, default_executor());
  EXPECT_EQ(listed.dq, expected.dq);
  EXPECT_EQ(listed.dk, expected.dk);
  EXPECT_EQ(listed.dv, expected.dv);
  EXPECT_EQ(listed.dsink, expected.dsink);

  if (!has_gradients(data.spec)) return;
  const PlainBackward plain = plain_backward(masked, forward);
  const double factor = allowed_factor(masked, forward);
  const std::unique_ptr<Executor> one = make_thread_pool(1), five = make_thread_pool(5);
  on_each_target([&] {
    const Gradients out = run_backward(data, lists.views, after.o, after.lse, "cpu", one.get());
    judge("dq", out.dq, expected.dq, plain.dq, factor);
    judge("dk", out.dk, expected.dk, plain.dk, factor);
    judge("dv", out.dv, expected.dv, plain.dv, factor);
    judge("dsink", out.dsink, expected.dsink, plain.dsink, kFactor);
    const Gradients again = run_backward(data, lists.views, after.o, after.lse, "cpu", five.get());
    EXPECT_TRUE(out.dq.same_bits(again.dq) && out.dk.same_bits(again.dk) && out.dv.same_bits(again.dv))
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
    const Outputs first = run(data, lists.views, "cpu", one.get()), second = run(data, lists.views, "cpu", five.get());
    EXPECT_TRUE(first.o.same_bits(second.o));
    EXPECT_TRUE(first.lse.same_bits(second.lse));
    if (lists.counts.given()) return;  // then the first entries are others
    const Outputs third = run(data, other, "cpu", one.get());
    EXPECT_TRUE(first.o.same_bits(third.o));
    EXPECT_TRUE(first.lse.same_bits(third.lse));
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Sparse, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// A row's bits are its own: the same row alone, in another place of another batch, with other neighbours' lists.
TEST(SparseInvariance, ARowAloneIsTheRowAmongOthers) {
  CaseData data(call(DType::bf16, 2, 8, 2, 150, 400, 64));
  const CaseLists lists(data, {.block_size = 32, .units = 2, .entries = 5});
  on_each_target([&] {
    const Outputs all = run(data, lists.views, "cpu");
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
  CaseData data(call(DType::f32, 2, 4, 2, 70, 150, 32, [](auto& c) { c.causal = Causal::bottom_right; }));
  const CaseLists lists(data, {.block_size = 32, .units = 2, .entries = 4});
  on_each_target([&] {
    const Outputs out = run(data, lists.views, "cpu");
    const Gradients once = run_backward(data, lists.views, out.o, out.lse, "cpu");
    Gradients sums = data.new_gradients();
    HostTensor* const all[] = {&sums.dq, &sums.dk, &sums.dv};
    const HostTensor* const own[] = {&once.dq, &once.dk, &once.dv};
    for (HostTensor* x : all) {
      for (std::int64_t n = 0; n < x->elements(); ++n) x->set(n, static_cast<double>(n % 7));
    }
    AttentionGradients views = sums.views();
    views.accumulate = true;
    const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
    const AttentionOptions options = options_of(data, "cpu");
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
  CaseData data(call(DType::f32, 2, 4, 2, 50, 120, 32));
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
    const Outputs out = run(data, lists.views, "cpu"), expected = run(data, plain.views, "cpu");
    EXPECT_TRUE(out.o.same_bits(expected.o));
    const Gradients found = run_backward(data, lists.views, out.o, out.lse, "cpu"),
                    other = run_backward(data, plain.views, out.o, out.lse, "cpu");
    EXPECT_TRUE(found.dq.same_bits(other.dq) && found.dk.same_bits(other.dk) && found.dv.same_bits(other.dv));
  });
}

// Values that no list names may hold anything.
TEST(SparseValues, WhatNobodyListsIsNotReadIntoARow) {
  CaseData data(call(DType::f32, 1, 2, 1, 40, 256, 32));
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
    const Outputs out = run(data, lists.views, "cpu");
    for (const double value : out.o.values()) ASSERT_TRUE(std::isfinite(value));
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
                   .counts = TensorView(counts.data(), DType::i32, {2, 6, 2})};
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
        Refused{"stride", [](BlockLists& l, AttentionOptions&) { l.blocks.stride[3] = 2; },
                "blocks must have contiguous entries: the last stride is 2"},
        Refused{"device", [](BlockLists& l, AttentionOptions&) { l.blocks.device = Device::cuda; },
                "blocks is on another device than q"},
        Refused{"method", [](BlockLists&, AttentionOptions& o) { o.method = "flash"; },
                "method is 'flash': attention over lists has one; leave it empty, or name a candidate as force"},
        Refused{"precision", [](BlockLists&, AttentionOptions& o) { o.precision = Precision::tf32; },
                "precision is not f32: attention over lists has no other"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

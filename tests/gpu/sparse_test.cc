// Attention over lists of key blocks on the GPU: every case of the table, bits that nothing but a row's own list
// changes, and repeats.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/sparse_calls.h"
#include "kit/sparse_case.h"

namespace heddle::kit {
namespace {

// Whether Hopper's dense kernels take the forward; gradients of lists of 64 rows and more.
bool of_tiles(const SparseCase& c) { return std::string_view(c.name).starts_with("tiles"); }

class GpuSparse : public ::testing::TestWithParam<SparseCase> {};

TEST_P(GpuSparse, IsAttentionUnderTheMaskThatSaysTheSame) {
  SparseRunner host(GetParam());
  const CaseRunner there(GetParam().call, 1, Device::cuda);
  const DeviceTensor blocks(host.lists.blocks), counts(host.lists.counts), masks(host.lists.masks),
      mask_ids(host.lists.mask_ids);
  ForwardOutputs out{host.data.new_o(), host.data.new_lse()};
  DeviceTensor o(out.o), lse(out.lse);
  SparseCall call{there.inputs().q, there.inputs().k, there.inputs().v,      o.view(),
                  lse.view(),       host.lists.views, there.inputs().options};
  call.lists.blocks = blocks.view();
  call.lists.counts = counts.view();
  call.lists.masks = masks.view();
  call.lists.mask_ids = mask_ids.view();
  call.options.mask = {};
  std::string refusals;
  int served = 0;
  bool by_tiles = false, hopper = true;
  for (const Candidate& candidate : call.explain()) {
    if (!candidate.supported) {
      hopper = hopper && !candidate.reason.starts_with("it needs a Hopper GPU");
      refusals += candidate.name + ": " + candidate.reason + "; ";
      continue;
    }
    ++served;
    by_tiles = by_tiles || candidate.name == "sm90_tiles";
    SCOPED_TRACE(candidate.name + ": " + candidate.plan);
    call.options.force = candidate.name;
    ForwardOutputs first{host.data.new_o(), host.data.new_lse()};
    for (int round = 0; round < 3; ++round) {
      o.write(host.data.new_o());
      lse.write(host.data.new_lse());
      call.run();
      o.read(out.o);
      lse.read(out.lse);
      if (round == 0) {
        const CaseResult result = host.judge(out, candidate.name);
        ASSERT_TRUE(result.passed) << result.message();
        o.read(first.o);
        lse.read(first.lse);
      }
      EXPECT_TRUE(same_bits(first, out)) << "round " << round << ": " << differences(first.o, out.o) << " of o, "
                                         << differences(first.lse, out.lse) << " of lse";
    }
    // One CTA then has all of a list, and nothing is joined behind it.
    call.options.batch_invariant = true;
    o.write(host.data.new_o());
    lse.write(host.data.new_lse());
    call.run();
    o.read(out.o);
    lse.read(out.lse);
    const CaseResult result = host.judge(out, candidate.name);
    EXPECT_TRUE(result.passed) << "batch_invariant: " << result.message();
    call.options.batch_invariant = false;
  }
  const DType dtype = GetParam().call.dtype;
  const bool expected = (dtype == DType::bf16 || dtype == DType::f16) &&
                        GetParam().call.page_size % GetParam().lists.block_size == 0 &&
                        !GetParam().call.cache_batch_idx && !host.lists.masks.given();
  EXPECT_EQ(served > 0, expected) << refusals;
  EXPECT_TRUE(by_tiles || !of_tiles(GetParam()) || !hopper) << refusals;
}

TEST_P(GpuSparse, HasTheGradientsOfAttentionUnderTheMask) {
  if (!GetParam().call.has_backward()) GTEST_SKIP() << "attention has none";
  SparseRunner host(GetParam());
  const CaseRunner there(GetParam().call, 1, Device::cuda);
  const ForwardOutputs& after = host.rounded_forward();
  const DeviceTensor o(after.o), lse(after.lse);
  SparseGradientCall call(there, host.lists, o.view(), lse.view(), host.data.new_gradients());
  std::string refusals;
  int served = 0;
  bool by_tiles = false, hopper = true;
  for (const Candidate& candidate : call.explain()) {
    if (!candidate.supported) {
      hopper = hopper && !candidate.reason.starts_with("it needs a Hopper GPU");
      refusals += candidate.name + ": " + candidate.reason + "; ";
      continue;
    }
    ++served;
    by_tiles = by_tiles || candidate.name == "sm90_tiles";
    SCOPED_TRACE(candidate.name + ": " + candidate.plan);
    call.options.force = candidate.name;
    BackwardOutputs out;
    Gradients first;
    // In whatever order sums come, and in the same one.
    call.options.deterministic = false;
    out.gradients = call.run(0xFF);
    const CaseResult unordered = host.judge(out, candidate.name);
    EXPECT_TRUE(unordered.passed) << unordered.message();
    call.options.deterministic = true;
    for (int round = 0; round < 3; ++round) {
      out.gradients = call.run(round == 1 ? 0x00 : 0xFF);
      if (round == 0) {
        const CaseResult result = host.judge(out, candidate.name);
        EXPECT_TRUE(result.passed) << result.message();
        first = out.gradients;
      }
      EXPECT_TRUE(same_bits(first, out.gradients))
          << "round " << round << ": " << differences(first.dq, out.gradients.dq) << " of dq, "
          << differences(first.dk, out.gradients.dk) << " of dk, " << differences(first.dv, out.gradients.dv)
          << " of dv";
    }
    // Each gradient alone is what it is with the others.
    const AttentionGradients all = call.gradients;
    for (TensorView AttentionGradients::*one :
         {&AttentionGradients::dq, &AttentionGradients::dk, &AttentionGradients::dv, &AttentionGradients::dsink}) {
      if (!(all.*one).given()) continue;
      call.gradients = {};
      call.gradients.*one = all.*one;
      const Gradients alone = call.run(0xFF);
      const auto same = [&](TensorView AttentionGradients::*which, const HostTensor& x, const HostTensor& y) {
        return one != which || x.same_bits(y);
      };
      EXPECT_TRUE(same(&AttentionGradients::dq, alone.dq, first.dq) &&
                  same(&AttentionGradients::dk, alone.dk, first.dk) &&
                  same(&AttentionGradients::dv, alone.dv, first.dv) &&
                  same(&AttentionGradients::dsink, alone.dsink, first.dsink));
    }
    call.gradients = all;
  }
  const DType dtype = GetParam().call.dtype;
  EXPECT_EQ(served > 0, (dtype == DType::bf16 || dtype == DType::f16) && GetParam().has_gradients() &&
                            !GetParam().call.float32_out && !host.lists.masks.given())
      << refusals;
  EXPECT_TRUE(by_tiles || !of_tiles(GetParam()) || GetParam().lists.query_rows < 64 || !hopper) << refusals;
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSparse, ::testing::ValuesIn(sparse_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Rows have the bits that calls of some of them have, and that a repeat has: of groups of 8 by keys, with more pairs
// than are kept at a time, and of 16, whose neighbours Hopper takes together.
class GpuSparseRows : public ::testing::TestWithParam<int> {};

TEST_P(GpuSparseRows, BitsDoNotDependOnTheOtherRows) {
  constexpr std::int64_t kRows = 8192, kKvHeads = 4, kSize = 128, kEntries = 16, kBlock = 64;
  const std::int64_t heads = kKvHeads * GetParam();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto drawn = [&](std::vector<std::int64_t> shape) {
    HostTensor x = HostTensor::input(DType::bf16, shape);
    for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
    return x;
  };
  const DeviceTensor q(drawn({1, kRows, heads, kSize})), k(drawn({1, kRows, kKvHeads, kSize})),
      v(drawn({1, kRows, kKvHeads, kSize}));
  HostTensor lists = HostTensor::input(DType::i32, {1, kRows, kKvHeads, kEntries});
  for (std::int64_t n = 0; n < lists.elements(); ++n) {
    const auto row = n / (kKvHeads * kEntries), slot = n % kEntries, current = row / kBlock;
    lists.set(n, static_cast<double>(
                     slot == 0   ? 0
                     : slot == 1 ? current
                                 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(current + 1))));
  }
  const DeviceTensor blocks(lists);
  HostTensor host_o = HostTensor::output(DType::bf16, {1, kRows, heads, kSize}),
             host_lse = HostTensor::output(DType::f32, {1, heads, kRows});
  const auto outputs = [&](std::int64_t first, std::int64_t end) {
    DeviceTensor o(host_o), lse(host_lse);
    HostTensor offset = HostTensor::input(DType::i32, {1});
    offset.set(0, static_cast<double>(first));
    const DeviceTensor q_offset(offset);
    const auto rows = [&](TensorView view, int extent) {
      view.data = static_cast<std::byte*>(view.data) +
                  first * view.stride[extent] * static_cast<std::int64_t>(size_of(view.dtype));
      view.shape[extent] = end - first;
      return view;
    };
    SparseCall call{rows(q.view(), 1), k.view(), v.view(), rows(o.view(), 1), rows(lse.view(), 2), {}, {}};
    call.lists.blocks = rows(blocks.view(), 1);
    call.lists.block_size = kBlock;
    call.options.causal = Causal::top_left;
    call.options.q_offset = q_offset.view();
    call.run();
    ForwardOutputs out{HostTensor::output(DType::bf16, {1, kRows, heads, kSize}),
                       HostTensor::output(DType::f32, {1, heads, kRows})};
    o.read(out.o);
    lse.read(out.lse);
    return out;
  };
  const ForwardOutputs all = outputs(0, kRows), again = outputs(0, kRows);
  EXPECT_TRUE(same_bits(all, again));
  expect_finite(all);
  for (const std::int64_t end : {std::int64_t{100}, std::int64_t{3000}, kRows}) {
    const std::int64_t first = end == 100 ? 0 : end == 3000 ? 100 : 3000;
    const ForwardOutputs some = outputs(first, end);
    std::int64_t other = 0;
    for (std::int64_t row = first; row < end; ++row) {
      for (std::int64_t n = 0; n < heads * kSize; ++n) {
        other += some.o.get(row * heads * kSize + n) != all.o.get(row * heads * kSize + n);
      }
      for (std::int64_t h = 0; h < heads; ++h) other += some.lse.get(h * kRows + row) != all.lse.get(h * kRows + row);
    }
    EXPECT_EQ(other, 0) << "rows " << first << " to " << end;
  }
}

INSTANTIATE_TEST_SUITE_P(GpuSparseLong, GpuSparseRows, ::testing::Values(8, 16));

// Lists that name all blocks, in some order: the gradients of dense attention, by many items a block and several rounds
// of partial results, the same every time.
TEST(GpuSparseLong, GradientsOverAllBlocksAreThoseOfDenseAttention) {
  constexpr std::int64_t kRows = 4096, kHeads = 32, kKvHeads = 2, kSize = 128, kBlock = 64, kEntries = kRows / kBlock;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const auto drawn = [&](std::int64_t heads) {
    HostTensor x = HostTensor::input(DType::bf16, {1, kRows, heads, kSize});
    for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
    return x;
  };
  const DeviceTensor q(drawn(kHeads)), k(drawn(kKvHeads)), v(drawn(kKvHeads)), d_o(drawn(kHeads));
  HostTensor lists = HostTensor::input(DType::i32, {1, kRows, kKvHeads, kEntries});
  for (std::int64_t n = 0; n < lists.elements(); ++n) {
    const std::int64_t row = n / (kKvHeads * kEntries);
    lists.set(n, static_cast<double>((n % kEntries * 5 + row) % kEntries));  // 5 and 64 have no common factor
  }
  const DeviceTensor blocks(lists);
  const HostTensor poison = HostTensor::output(DType::bf16, {1, kRows, kHeads, kSize}),
                   key_poison = HostTensor::output(DType::bf16, {1, kRows, kKvHeads, kSize}),
                   lse_poison = HostTensor::output(DType::f32, {1, kHeads, kRows});
  const DeviceTensor o(poison), lse(lse_poison);
  SparseCall forward{q.view(), k.view(), v.view(), o.view(), lse.view(), {}, {}};
  forward.lists.blocks = blocks.view();
  forward.lists.block_size = kBlock;
  forward.options.causal = Causal::top_left;
  forward.run();
  const auto gradients = [&](bool dense) {
    DeviceTensor dq(poison), dk(key_poison), dv(key_poison);
    const AttentionGradients to{dq.view(), dk.view(), dv.view(), {}, {}};
    const AttentionOptions& options = forward.options;
    const DeviceStream stream;
    const DeviceMemory memory(
        dense ? attention_backward_workspace(q.view(), k.view(), v.view(), to, options)
              : sparse_attention_backward_workspace(q.view(), k.view(), v.view(), forward.lists, to, options),
        0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    if (dense) {
      attention_backward(q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}, to, options, runtime);
    } else {
      sparse_attention_backward(q.view(), k.view(), v.view(), forward.lists, o.view(), lse.view(), d_o.view(), {}, to,
                                options, runtime);
    }
    stream.synchronize();
    Gradients out{poison, key_poison, key_poison, {}, {}};
    dq.read(out.dq);
    dk.read(out.dk);
    dv.read(out.dv);
    return out;
  };
  const Gradients listed = gradients(false), expected = gradients(true);
  expect_finite(listed);
  EXPECT_TRUE(close(expected, listed));
  for (int round = 0; round < 10; ++round) EXPECT_TRUE(same_bits(listed, gradients(false))) << "round " << round;
}

}  // namespace
}  // namespace heddle::kit

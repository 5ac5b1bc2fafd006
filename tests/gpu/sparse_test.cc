// Attention over lists of key blocks on the GPU: every case of the table, bits that nothing but a row's own list
// changes, and repeats.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "gpu/device_call.h"
#include "heddle/sparse.h"
#include "kit/sparse_case.h"

namespace heddle::kit {
namespace {

struct SparseCall {
  TensorView q, k, v, o, lse;
  BlockLists lists;
  AttentionOptions options;

  std::vector<Candidate> explain() const { return explain_sparse_attention(q, k, v, lists, options); }
  void run() const {
    const DeviceStream stream;
    const DeviceMemory memory(sparse_attention_forward_workspace(q, k, v, lists, options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    sparse_attention_forward(q, k, v, lists, o, lse, options, runtime);
    stream.synchronize();
  }
};

// "3, the first one at 17: 0.5 and 0.25"
std::string differences(const HostTensor& one, const HostTensor& other) {
  const std::vector<double> x = one.values(), y = other.values();
  std::size_t count = 0, first = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (x[n] == y[n] || (x[n] != x[n] && y[n] != y[n])) continue;
    if (count++ == 0) first = n;
  }
  return count == 0 ? "none" : text(count, ", the first one at ", first, ": ", x[first], " and ", y[first]);
}

class GpuSparse : public ::testing::TestWithParam<SparseCase> {};

TEST_P(GpuSparse, IsAttentionUnderTheMaskThatSaysTheSame) {
  SparseRunner host(GetParam());
  const CaseRunner there(GetParam().call, 1, Device::cuda);
  const DeviceTensor blocks(host.lists.blocks), counts(host.lists.counts);
  ForwardOutputs out{host.data.new_o(), host.data.new_lse()};
  DeviceTensor o(out.o), lse(out.lse);
  SparseCall call{there.inputs().q, there.inputs().k, there.inputs().v,      o.view(),
                  lse.view(),       host.lists.views, there.inputs().options};
  call.lists.blocks = blocks.view();
  call.lists.counts = counts.view();
  call.options.mask = {};
  std::string refusals;
  int served = 0;
  for (const Candidate& candidate : call.explain()) {
    if (!candidate.supported) {
      refusals += candidate.name + ": " + candidate.reason + "; ";
      continue;
    }
    ++served;
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
  }
  const DType dtype = GetParam().call.dtype;
  const bool expected = (dtype == DType::bf16 || dtype == DType::f16) && GetParam().call.page_size == 0 &&
                        !GetParam().call.cache_batch_idx;
  EXPECT_EQ(served > 0, expected) << refusals;
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSparse, ::testing::ValuesIn(sparse_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// More pairs than are kept at a time: rows have the bits that calls of some of them have, and that a repeat has.
TEST(GpuSparseLong, BitsDoNotDependOnTheOtherRows) {
  constexpr std::int64_t kRows = 8192, kHeads = 64, kKvHeads = 4, kSize = 128, kEntries = 16, kBlock = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto drawn = [&](std::vector<std::int64_t> shape) {
    HostTensor x = HostTensor::input(DType::bf16, shape);
    for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
    return x;
  };
  const DeviceTensor q(drawn({1, kRows, kHeads, kSize})), k(drawn({1, kRows, kKvHeads, kSize})),
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
  HostTensor host_o = HostTensor::output(DType::bf16, {1, kRows, kHeads, kSize}),
             host_lse = HostTensor::output(DType::f32, {1, kHeads, kRows});
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
    ForwardOutputs out{HostTensor::output(DType::bf16, {1, kRows, kHeads, kSize}),
                       HostTensor::output(DType::f32, {1, kHeads, kRows})};
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
      for (std::int64_t n = 0; n < kHeads * kSize; ++n) {
        other += some.o.get(row * kHeads * kSize + n) != all.o.get(row * kHeads * kSize + n);
      }
      for (std::int64_t h = 0; h < kHeads; ++h) other += some.lse.get(h * kRows + row) != all.lse.get(h * kRows + row);
    }
    EXPECT_EQ(other, 0) << "rows " << first << " to " << end;
  }
}

}  // namespace
}  // namespace heddle::kit

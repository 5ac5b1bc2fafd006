// Elements further from a tensor's first than 2^31 and 2^32: only 64-bit addressing finds them.
#include <gtest/gtest.h>

#include <cstring>

#include "gpu/device_call.h"
#include "gpu/far_tensors.h"

namespace heddle::kit {
namespace {

class GpuAddresses : public ::testing::TestWithParam<Spread> {};

TEST_P(GpuAddresses, FarElements) {
  const Spread& spread = GetParam();
  AttentionCase spec{.B = kB, .H = kHeads, .Hkv = kHeads, .Sq = kRows, .Sk = kRows, .D = kSize, .Dv = kSize};
  spec.dtype = DType::bf16;
  const std::size_t bytes = bytes_of(spread, spec.dtype);
  ASSERT_GT(bytes, kReach * size_of(spec.dtype));
  if (current_gpu().memory < bytes + (std::size_t{2} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 30) + 2 << " GiB of GPU memory";
  }
  DeviceCase near(spec);
  DeviceMemory memory(bytes);
  const CaseData& data = near.runner.data();
  DeviceCall far = near.call;
  far.q = spread_out(memory, spread, 0, spec.dtype);
  far.k = spread_out(memory, spread, kSize, spec.dtype);
  far.v = spread_out(memory, spread, 2 * kSize, spec.dtype);
  far.o = spread_out(memory, spread, 3 * kSize, spec.dtype);
  const std::pair<const HostTensor*, TensorView*> inputs[] = {{&data.q, &far.q}, {&data.k, &far.k}, {&data.v, &far.v}};
  for (const auto& [host, view] : inputs) {
    each_row(*host, *view, memory, [&](std::byte* row, std::int64_t at, std::int64_t n) { memory.write(at, row, n); });
  }
  const std::vector<std::string> candidates = near.runner.candidates(Pass::forward);
  ASSERT_FALSE(candidates.empty());
  for (const std::string& candidate : candidates) {
    near.call.options.force = far.options.force = candidate;
    near.poison();
    near.call.run();
    const ForwardOutputs expected = near.read();
    expect_finite(expected);
    each_row(near.host_o, far.o, memory,
             [&](std::byte* row, std::int64_t at, std::int64_t n) { memory.write(at, row, n); });
    near.poison();
    far.run();
    ForwardOutputs out = near.read();
    each_row(out.o, far.o, memory, [&](std::byte* row, std::int64_t at, std::int64_t n) { memory.read(at, row, n); });
    EXPECT_TRUE(same_bits(expected, out)) << candidate << ": far elements give other bits";
  }
}

INSTANTIATE_TEST_SUITE_P(Spreads, GpuAddresses, ::testing::ValuesIn(kSpreads),
                         [](const auto& info) { return std::string(info.param.name); });

// lse is f32 [B, H, Sq]: its last sequence behind 2^32 elements.
TEST(GpuAddresses, FarLse) {
  AttentionCase spec{.B = kB, .H = kHeads, .Hkv = kHeads, .Sq = kRows, .Sk = kRows, .D = kSize, .Dv = kSize};
  spec.dtype = DType::bf16;
  const std::size_t bytes = static_cast<std::size_t>(kReach + 2 * kHeads * kRows) * sizeof(float);
  if (current_gpu().memory < bytes + (std::size_t{2} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 30) + 2 << " GiB of GPU memory";
  }
  DeviceCase near(spec);
  DeviceMemory memory(bytes);
  DeviceCall far = near.call;
  const std::int64_t stride = kReach + kHeads * kRows;
  far.lse = TensorView(memory.data(), DType::f32, {kB, kHeads, kRows}, {stride, kRows, 1});
  far.lse.device = Device::cuda;
  for (const std::string& candidate : near.runner.candidates(Pass::forward)) {
    near.call.options.force = far.options.force = candidate;
    near.call.run();
    const ForwardOutputs expected = near.read();
    far.run();
    ForwardOutputs out = expected;
    auto* lse = static_cast<std::byte*>(out.lse.view().data);
    const std::size_t sequence = kHeads * kRows * sizeof(float);
    std::memset(lse, 0, kB * sequence);
    for (std::int64_t b = 0; b < kB; ++b) memory.read(b * stride * sizeof(float), lse + b * sequence, sequence);
    EXPECT_TRUE(same_bits(expected, out)) << candidate << ": a far lse has other bits";
  }
}

}  // namespace
}  // namespace heddle::kit

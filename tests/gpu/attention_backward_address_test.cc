// Gradients of elements further from a tensor's first than 2^32: only 64-bit addressing finds them.
#include <gtest/gtest.h>

#include "gpu/device_backward.h"
#include "gpu/far_tensors.h"

namespace heddle::kit {
namespace {

class GpuBackwardAddresses : public ::testing::TestWithParam<Spread> {};

TEST_P(GpuBackwardAddresses, FarElements) {
  const Spread& spread = GetParam();
  AttentionCase spec{.B = kB, .H = kHeads, .Hkv = kHeads, .Sq = kRows, .Sk = kRows, .D = kSize, .Dv = kSize};
  spec.dtype = DType::bf16;
  const std::size_t bytes = bytes_of(spread, spec.dtype);
  if (current_gpu().memory < bytes + (std::size_t{2} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 30) + 2 << " GiB of GPU memory";
  }
  BackwardCase near(spec);
  DeviceMemory memory(bytes);
  const CaseData& data = near.forward.runner.data();
  const ForwardOutputs outputs = near.forward.read();
  BackwardCall far = near.call;
  TensorView* const views[] = {&far.forward.q, &far.forward.k,    &far.forward.v,    &far.forward.o,
                               &far.d_o,       &far.gradients.dq, &far.gradients.dk, &far.gradients.dv};
  for (std::int64_t n = 0; n < 8; ++n) *views[n] = spread_out(memory, spread, n * kSize, spec.dtype);
  const HostTensor* const inputs[] = {&data.q, &data.k, &data.v, &outputs.o, &data.d_o};
  for (int n = 0; n < 5; ++n) {
    each_row(*inputs[n], *views[n], memory,
             [&](std::byte* row, std::int64_t at, std::int64_t count) { memory.write(at, row, count); });
  }
  const std::vector<std::string> names = candidates(far);
  if (names.empty()) GTEST_SKIP() << "no candidate of the GPU takes it";
  for (const std::string& candidate : names) {
    SCOPED_TRACE(candidate);
    near.call.forward.options.force = far.forward.options.force = candidate;
    near.poison();
    near.call.run();
    const Gradients expected = near.read();
    expect_finite(expected);
    const HostTensor* const poison[] = {&near.host.dq, &near.host.dk, &near.host.dv};
    for (int n = 0; n < 3; ++n) {
      each_row(*poison[n], *views[5 + n], memory,
               [&](std::byte* row, std::int64_t at, std::int64_t count) { memory.write(at, row, count); });
    }
    near.poison();
    far.run();
    Gradients out = near.read();
    HostTensor* const read[] = {&out.dq, &out.dk, &out.dv};
    for (int n = 0; n < 3; ++n) {
      each_row(*read[n], *views[5 + n], memory,
               [&](std::byte* row, std::int64_t at, std::int64_t count) { memory.read(at, row, count); });
    }
    EXPECT_TRUE(close(expected, out)) << "far elements give other gradients";
  }
}

INSTANTIATE_TEST_SUITE_P(Spreads, GpuBackwardAddresses, ::testing::ValuesIn(kSpreads),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

// Elements further from a tensor's first than 2^31 and 2^32: only 64-bit addressing finds them.
#include <gtest/gtest.h>

#include <cstring>

#include "gpu/device_call.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kReach = std::int64_t{1} << 32;  // elements
constexpr std::int64_t kB = 2, kRows = 70, kHeads = 3, kSize = 64;

// Four tensors, spread over the same memory side by side: rows of 64 elements, strides so wide that the last row of
// each lies behind kReach elements.
struct Spread {
  const char* name;
  std::int64_t batch, row, head;  // strides in elements
};
void PrintTo(const Spread& spread, std::ostream* out) { *out << spread.name; }

constexpr std::int64_t kSlot = 4096;
const Spread kSpreads[] = {
    {"Batches", kReach + 64 * kSlot, kHeads* kSlot, kSlot},
    {"Rows", kSlot, kReach / (kRows - 1) / kSlot* kSlot + kSlot, kSlot / 4},
    {"Heads", 80 * kSlot, kSlot, kReach / 2 / kSlot* kSlot + 200 * kSlot},
};

class GpuAddresses : public ::testing::TestWithParam<Spread> {};

TensorView spread_out(const DeviceMemory& memory, const Spread& spread, std::int64_t offset, DType dtype) {
  TensorView view(static_cast<std::byte*>(memory.data()) + offset * static_cast<std::int64_t>(size_of(dtype)), dtype,
                  {kB, kRows, kHeads, kSize}, {spread.batch, spread.row, spread.head, 1});
  view.device = Device::cuda;
  return view;
}

// Calls `copy(host row, byte offset in memory, bytes)` for each row of a tensor.
template <class Copy>
void each_row(const HostTensor& host, const TensorView& view, const DeviceMemory& memory, const Copy& copy) {
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  const auto base = static_cast<const std::byte*>(view.data) - static_cast<const std::byte*>(memory.data());
  const TensorView& from = host.view();
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        std::byte* row =
            static_cast<std::byte*>(from.data) + (b * from.stride[0] + i * from.stride[1] + h * from.stride[2]) * width;
        copy(row, base + (b * view.stride[0] + i * view.stride[1] + h * view.stride[2]) * width, kSize * width);
      }
    }
  }
}

TEST_P(GpuAddresses, FarElements) {
  const Spread& spread = GetParam();
  AttentionCase spec{.B = kB, .H = kHeads, .Hkv = kHeads, .Sq = kRows, .Sk = kRows, .D = kSize, .Dv = kSize};
  spec.dtype = DType::bf16;
  const std::int64_t last = (kB - 1) * spread.batch + (kRows - 1) * spread.row + (kHeads - 1) * spread.head;
  ASSERT_GT(last, kReach);
  const auto bytes = static_cast<std::size_t>(last + 8 * kSize) * 2;
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

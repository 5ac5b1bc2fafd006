// Merges of partial results and their gradients on the GPU: the cases of the CPU's tests and what a launch has beside
// them, bits that are promised, and tensors whose elements lie far apart.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>

#include "gpu/far_tensors.h"
#include "heddle/error.h"
#include "kernels/merge_cases.h"
#include "kit/device_mirror.h"
#include "reference/partial.h"

namespace heddle::kit {
namespace {

using std::int64_t;

// Where many rows let a warp find the exponentials of two and of four rows at once.
const MergeCase kManyRows[] = {
    {"rows", DType::f32, 2, false, true, true, Layout::contiguous, 2, 601, 8, 128},
    {"more_rows", DType::bf16, 2, false, true, true, Layout::heads_first, 2, 2503, 9, 64},
    {"odd_rows", DType::f16, 3, true, false, true, Layout::padded_rows, 1, 5003, 5, 40},
    {"narrow_rows", DType::f32, 5, false, true, false, Layout::contiguous, 1, 7001, 5, 3},
};

Runtime runtime_of(const DeviceStream& stream, const DeviceMemory& memory) {
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {memory.data(), memory.bytes()};
  return runtime;
}

void merge_there(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                 const TensorView& sink) {
  const DeviceStream stream;
  const DeviceMemory memory(merge_attention_workspace(partials, o, lse, {.sink = sink}), 0xFF);
  merge_attention(partials, o, lse, {.sink = sink}, runtime_of(stream, memory));
  stream.synchronize();
}

void merge_gradients_there(std::span<const Partial> partials, const TensorView& d_o, const TensorView& d_lse,
                           std::span<const Partial> gradients, const TensorView& dsink, const TensorView& sink) {
  const DeviceStream stream;
  const DeviceMemory memory(merge_attention_backward_workspace(partials, d_o, d_lse, gradients, dsink, {.sink = sink}),
                            0xFF);
  merge_attention_backward(partials, d_o, d_lse, gradients, dsink, {.sink = sink}, runtime_of(stream, memory));
  stream.synchronize();
}

// Parts mirrored into the GPU's memory.
struct PartsThere {
  std::deque<DeviceTensor> memory;
  std::vector<Partial> partials;
  DeviceTensor sink, d_o, d_lse;

  explicit PartsThere(const MergeData& parts) : sink(parts.sink), d_o(parts.d_o), d_lse(parts.d_lse) {
    for (std::size_t n = 0; n < parts.partials.size(); ++n) {
      const TensorView &o = memory.emplace_back(parts.os[n]).view(), &lse = memory.emplace_back(parts.lses[n]).view();
      partials.push_back({o, lse});
    }
  }
};

// What a call wrote.
struct Result {
  HostTensor o, lse;
};
Result merged(const MergeData& parts, const PartsThere& there, DType dtype) {
  Result out{parts.rows(dtype), parts.per_row()};
  const DeviceTensor o(out.o), lse(out.lse);
  merge_there(there.partials, o.view(), lse.view(), there.sink.view());
  o.read(out.o);
  lse.read(out.lse);
  return out;
}

struct GradientResult {
  std::vector<Result> partials;
  HostTensor dsink;
};
GradientResult gradients(const MergeData& parts, const PartsThere& there) {
  GradientResult out;
  std::deque<DeviceTensor> memory;
  std::vector<Partial> views;
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    out.partials.push_back({parts.rows(parts.s.dtype), parts.per_row()});
    const TensorView &o = memory.emplace_back(out.partials[n].o).view(),
                     &lse = memory.emplace_back(out.partials[n].lse).view();
    views.push_back({o, lse});
  }
  if (parts.s.sink) out.dsink = HostTensor::output(DType::f32, {parts.s.H});
  const DeviceTensor dsink(out.dsink);
  merge_gradients_there(there.partials, there.d_o.view(), there.d_lse.view(), views, dsink.view(), there.sink.view());
  for (std::size_t n = 0; n < parts.s.partials; ++n) {
    memory[2 * n].read(out.partials[n].o);
    memory[2 * n + 1].read(out.partials[n].lse);
  }
  if (parts.s.sink) dsink.read(out.dsink);
  return out;
}

class GpuMergeAttention : public ::testing::TestWithParam<MergeCase> {};

TEST_P(GpuMergeAttention, MatchesReference) {
  const MergeData parts(GetParam());
  const PartsThere there(parts);
  const reference::Merged exact = reference::merge_attention(parts.problem());
  double size = 0;
  for (double x : exact.o) size = std::max(size, std::abs(x));
  for (const DType dtype : merged_dtypes(parts.s)) {
    const Result found = merged(parts, there, dtype);
    expect_near(found.o, exact.o, 2 * static_cast<double>(parts.s.partials) + 3, 4 * size);
    expect_near(found.lse, exact.lse, 1, 1);
    const Result again = merged(parts, there, dtype);
    EXPECT_TRUE(again.o.same_bits(found.o) && again.lse.same_bits(found.lse));
    HostTensor alone = parts.rows(dtype);
    const DeviceTensor to(alone);
    merge_there(there.partials, to.view(), {}, there.sink.view());
    to.read(alone);
    EXPECT_TRUE(alone.same_bits(found.o));
    EXPECT_TRUE(is_rounded(found.o, merged(parts, there, DType::f32).o));
  }
}

TEST_P(GpuMergeAttention, GradientsMatchReference) {
  for (const DType d_o_dtype : {DType::f32, GetParam().dtype}) {
    const MergeData parts(GetParam(), d_o_dtype);
    const PartsThere there(parts);
    const reference::MergedBackward exact =
        reference::merge_attention_backward(parts.backward_problem(std::vector<Partial>(parts.s.partials)));
    const GradientResult found = gradients(parts, there), again = gradients(parts, there);
    const double d_o = largest(parts.d_o), dims = static_cast<double>(parts.s.Dv);
    for (std::size_t n = 0; n < parts.s.partials; ++n) {
      // As on the CPU (kernels/partial_test.cc).
      expect_near(found.partials[n].o, exact.partials[n].o, 2, d_o);
      expect_near(found.partials[n].lse, exact.partials[n].lse, dims, 6 * d_o * std::sqrt(dims));
      EXPECT_TRUE(again.partials[n].o.same_bits(found.partials[n].o)) << n;
      EXPECT_TRUE(again.partials[n].lse.same_bits(found.partials[n].lse)) << n;
    }
    if (parts.s.sink) {
      expect_near(found.dsink, exact.dsink, dims,
                  6 * d_o * std::sqrt(dims) * static_cast<double>(parts.s.S * parts.s.B));
      EXPECT_TRUE(again.dsink.same_bits(found.dsink));
    }
    // One gradient alone is what it is beside the others.
    std::vector<Partial> one(parts.s.partials);
    HostTensor lse = parts.per_row(), o = parts.rows(parts.s.dtype);
    const DeviceTensor lse_there(lse), o_there(o);
    one[1].lse = lse_there.view();
    merge_gradients_there(there.partials, there.d_o.view(), there.d_lse.view(), one, {}, there.sink.view());
    lse_there.read(lse);
    EXPECT_TRUE(lse.same_bits(found.partials[1].lse));
    one[1] = {o_there.view(), {}};
    merge_gradients_there(there.partials, there.d_o.view(), there.d_lse.view(), one, {}, there.sink.view());
    o_there.read(o);
    EXPECT_TRUE(o.same_bits(found.partials[1].o));
  }
}

const auto name_of_case = [](const auto& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Cases, GpuMergeAttention, ::testing::ValuesIn(merge_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(ManyRows, GpuMergeAttention, ::testing::ValuesIn(kManyRows), name_of_case);

// ---- Single rows, whose results are known

// A copy of a contiguous tensor in the GPU's memory.
struct Copied {
  DeviceMemory memory;
  TensorView view;

  explicit Copied(const TensorView& host) : view(host) {
    if (!host.given()) return;
    memory = DeviceMemory(bytes());
    memory.write(0, host.data, bytes());
    view.data = memory.data();
    view.device = Device::cuda;
  }
  std::size_t bytes() const { return static_cast<std::size_t>(view.elements()) * size_of(view.dtype); }
};

void merge_copies(std::span<const Partial> partials, const TensorView& o, const TensorView& lse,
                  const TensorView& sink) {
  std::deque<Copied> copies;
  const auto copied = [&](const TensorView& host) { return copies.emplace_back(host).view; };
  std::vector<Partial> there;
  for (const Partial& part : partials) there.push_back({copied(part.o), copied(part.lse)});
  const Copied to(o), to_lse(lse);
  merge_there(there, to.view, to_lse.view, copied(sink));
  to.memory.read(0, o.data, to.bytes());
  to_lse.memory.read(0, lse.data, to_lse.bytes());
}

TEST(GpuMergeAttentionRows, WithoutKeys) { expect_rows_without_keys(merge_copies); }
TEST(GpuMergeAttentionRows, WhatIsNotANumberStays) { expect_nan_stays(merge_copies); }
TEST(GpuMergeAttentionRows, FarLogarithms) { expect_far_logarithms(merge_copies); }

TEST(GpuMergeAttentionRows, OnePartialComesBack) { expect_one_comes_back(merge_copies); }

// Calls without rows write zeros to dsink, and nothing else.
TEST(GpuMergeAttentionRows, OrNone) {
  const DeviceMemory memory(64, 0xFF);
  const auto view = [&](std::initializer_list<int64_t> shape) {
    TensorView x(memory.data(), DType::f32, shape);
    x.device = Device::cuda;
    return x;
  };
  const Partial part{view({2, 0, 3, 8}), view({2, 3, 0})};
  const std::vector<Partial> partials(2, part);
  merge_there(partials, part.o, part.lse, view({3}));
  DeviceMemory sums(3 * sizeof(float), 0xFF);
  TensorView dsink(sums.data(), DType::f32, {3});
  dsink.device = Device::cuda;
  merge_gradients_there(partials, part.o, {}, partials, dsink, view({3}));
  float found[3];
  sums.read(0, found, sizeof found);
  for (const float x : found) EXPECT_EQ(x, 0.0f);
}

// Sums of many rows, of one sign: with d_lse = 1 and nothing else dsink is the sum of the sink's weights.
TEST(GpuMergeAttentionRows, SinksOfManyRows) {
  for (const MergeCase& spec : kManyRows) {
    if (!spec.sink || !spec.d_lse) continue;
    SCOPED_TRACE(spec.name);
    MergeData parts(spec);
    for (std::int64_t n = 0; n < parts.d_o.elements(); ++n) parts.d_o.set(n, 0);
    for (std::int64_t n = 0; n < parts.d_lse.elements(); ++n) parts.d_lse.set(n, 1);
    const PartsThere there(parts);
    const reference::MergedBackward exact =
        reference::merge_attention_backward(parts.backward_problem(std::vector<Partial>(parts.s.partials)));
    const GradientResult found = gradients(parts, there);
    for (std::int64_t h = 0; h < spec.H; ++h) {
      const double wanted = exact.dsink[static_cast<std::size_t>(h)];
      EXPECT_NEAR(found.dsink.get(h), wanted, 0x1p-16 * wanted) << h;
    }
  }
}

// ---- Where outputs are

TEST(GpuMergeAttention, InPlaceIsTheSame) {
  for (const char* name : {"sink", "bf16", "heads_first", "many", "hundred"}) {
    SCOPED_TRACE(name);
    const MergeData parts(merge_case(name));
    const PartsThere there(parts);
    const Result expected = merged(parts, there, parts.s.dtype);
    for (const std::size_t which : {std::size_t{0}, parts.s.partials - 1}) {
      const PartsThere again(parts);
      const auto& [own, own_lse] = again.partials[which];
      merge_there(again.partials, own, own_lse, again.sink.view());
      HostTensor o = parts.os[which], lse = parts.lses[which];
      again.memory[2 * which].read(o);
      again.memory[2 * which + 1].read(lse);
      EXPECT_EQ(o.values(), expected.o.values()) << which;
      EXPECT_EQ(lse.values(), expected.lse.values()) << which;
    }
  }
}

// In a graph the partials' table is written anew by each replay.
TEST(GpuMergeAttention, CanBeCaptured) {
  for (const char* name : {"sink", "hundred"}) {
    SCOPED_TRACE(name);
    const MergeData parts(merge_case(name));
    const PartsThere there(parts);
    const Result expected = merged(parts, there, DType::f32);
    Result found{parts.rows(DType::f32), parts.per_row()};
    const DeviceTensor o(found.o), lse(found.lse);
    const DeviceStream stream;
    const MergeOptions options{.sink = there.sink.view()};
    DeviceMemory memory(merge_attention_workspace(there.partials, o.view(), lse.view(), options), 0xFF);
    const DeviceGraph graph(
        stream, [&] { merge_attention(there.partials, o.view(), lse.view(), options, runtime_of(stream, memory)); });
    const std::vector<std::byte> junk(memory.bytes(), std::byte{0xFF});
    if (!junk.empty()) memory.write(0, junk.data(), junk.size());
    graph.replay(stream);
    stream.synchronize();
    o.read(found.o);
    lse.read(found.lse);
    EXPECT_TRUE(found.o.same_bits(expected.o) && found.lse.same_bits(expected.lse));
  }
}

TEST(GpuMergeAttention, RefusesASmallWorkspace) {
  const MergeData parts(merge_case("hundred"));
  const PartsThere there(parts);
  HostTensor o = parts.rows(DType::f32);
  const DeviceTensor to(o);
  const std::size_t needed = merge_attention_workspace(there.partials, to.view(), {});
  EXPECT_GT(needed, 0u);
  EXPECT_THROW(merge_attention(there.partials, to.view(), {}), Error);
  to.read(o);
  EXPECT_TRUE(o.same_bits(parts.rows(DType::f32)));
}

// ---- Far apart

class GpuMergeAddresses : public ::testing::TestWithParam<Spread> {};

TEST_P(GpuMergeAddresses, FarElements) {
  const Spread& spread = GetParam();
  const MergeData parts({"far", DType::bf16, 2, false, true, true, Layout::contiguous, kB, kRows, kHeads, kSize},
                        DType::bf16);
  const std::size_t bytes = bytes_of(spread, parts.s.dtype);
  if (current_gpu().memory < bytes + (std::size_t{2} << 30)) {
    GTEST_SKIP() << "needs " << (bytes >> 30) + 2 << " GiB of GPU memory";
  }
  const PartsThere there(parts);
  DeviceMemory memory(bytes);
  const auto far = [&](int64_t n) { return spread_out(memory, spread, n * kSize, parts.s.dtype); };
  const auto write = [&](const HostTensor& host, const TensorView& view) {
    each_row(host, view, memory, [&](std::byte* row, int64_t at, int64_t n) { memory.write(at, row, n); });
  };
  const auto expect_rows = [&](const HostTensor& expected, const TensorView& view) {
    HostTensor found = expected;
    std::memset(found.memory().data(), 0, found.memory().size());
    each_row(found, view, memory, [&](std::byte* row, int64_t at, int64_t n) { memory.read(at, row, n); });
    EXPECT_EQ(found.values(), expected.values());
  };
  std::vector<Partial> partials = there.partials, far_gradients;
  for (int64_t n = 0; n < 2; ++n) {
    partials[n].o = far(n);
    write(parts.os[n], partials[n].o);
    far_gradients.push_back({far(4 + n), {}});
  }
  write(parts.d_o, far(2));

  const Result expected = merged(parts, there, parts.s.dtype);
  merge_there(partials, far(3), {}, there.sink.view());
  expect_rows(expected.o, far(3));

  const GradientResult expected_gradients = gradients(parts, there);
  merge_gradients_there(partials, far(2), there.d_lse.view(), far_gradients, {}, there.sink.view());
  for (int64_t n = 0; n < 2; ++n) expect_rows(expected_gradients.partials[n].o, far(4 + n));
}

INSTANTIATE_TEST_SUITE_P(Spreads, GpuMergeAddresses, ::testing::ValuesIn(kSpreads), name_of_case);

// More rows than 32 bits number: all sequences share the partials, and so have the same results.
TEST(GpuMergeAddresses, MoreRowsThan32Bits) {
  constexpr int64_t kSequences = 65537, kS = 256, kH = 256, kSequenceBytes = kS * kH * 2;
  constexpr std::size_t kBytes = kSequences * kSequenceBytes;
  if (current_gpu().memory < kBytes + (std::size_t{2} << 30)) {
    GTEST_SKIP() << "needs " << (kBytes >> 30) + 2 << " GiB of GPU memory";
  }
  const MergeData parts({"one", DType::f16, 2, false, false, false, Layout::contiguous, 1, kS, kH, 1});
  const PartsThere there(parts);
  const Result expected = merged(parts, there, DType::f16);
  DeviceMemory memory(kBytes);
  std::vector<Partial> partials = there.partials;
  for (auto& [o, lse] : partials) {
    o.shape[0] = lse.shape[0] = kSequences;
    o.stride[0] = lse.stride[0] = 0;
  }
  TensorView o(memory.data(), DType::f16, {kSequences, kS, kH, 1});
  o.device = Device::cuda;
  merge_there(partials, o, {}, {});
  HostTensor found = HostTensor::input(DType::f16, {1, kS, kH, 1});
  for (const int64_t b : {int64_t{0}, int64_t{32767}, int64_t{32768}, kSequences - 2, kSequences - 1}) {
    memory.read(b * kSequenceBytes, found.memory().data(), kSequenceBytes);
    EXPECT_EQ(found.values(), expected.o.values()) << b;
  }
}

}  // namespace
}  // namespace heddle::kit

// What ranks do with their memory beside attention: on a GPU to the bit what it is on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "distributed/memory.h"
#include "heddle/error.h"
#include "kit/device_mirror.h"

namespace heddle::kit {
namespace {

using distributed::Buffer;
using distributed::Memory;
using std::int64_t;

// Small numbers, and now and then one that rounding makes infinite, a subnormal or a tie.
HostTensor drawn(DType dtype, const std::vector<int64_t>& shape, Layout layout, unsigned seed) {
  HostTensor x = HostTensor::output(dtype, shape, layout);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  constexpr double kSpecial[] = {1e38, -70000, 3e-6, -0.0, 1.00390625, 1.01171875};
  for (int64_t n = 0; n < x.elements(); ++n) x.set(n, random() % 50 == 0 ? kSpecial[random() % 6] : normal(random));
  return x;
}

struct RowsCase {
  const char* name;
  DType from, to;
  int64_t B, H, D;
  Layout from_layout, to_layout;
  bool add = false;
};

void PrintTo(const RowsCase& c, std::ostream* out) { *out << c.name; }

constexpr RowsCase kRowsCases[] = {
    {"bytes_16", DType::bf16, DType::bf16, 2, 4, 64, Layout::contiguous, Layout::contiguous},
    {"bytes_8", DType::bf16, DType::bf16, 2, 3, 12, Layout::contiguous, Layout::contiguous},
    {"bytes_4", DType::f16, DType::f16, 1, 3, 6, Layout::contiguous, Layout::contiguous},
    {"bytes_2", DType::f16, DType::f16, 3, 5, 7, Layout::contiguous, Layout::contiguous},
    {"floats", DType::f32, DType::f32, 2, 2, 9, Layout::contiguous, Layout::contiguous},
    {"off_alignment", DType::bf16, DType::bf16, 2, 4, 64, Layout::padded_rows, Layout::contiguous},
    {"into_gaps", DType::f32, DType::f32, 2, 4, 24, Layout::contiguous, Layout::padded_rows},
    {"heads_first", DType::bf16, DType::bf16, 2, 4, 40, Layout::heads_first, Layout::contiguous},
    {"strided", DType::f32, DType::f32, 1, 4, 10, Layout::strided_dim, Layout::contiguous},
    {"reversed", DType::bf16, DType::bf16, 1, 2, 8, Layout::reversed, Layout::contiguous},
    {"lse", DType::f32, DType::f32, 2, 6, 1, Layout::heads_first, Layout::contiguous},
    {"to_bf16", DType::f32, DType::bf16, 2, 3, 20, Layout::contiguous, Layout::padded_rows},
    {"to_f16", DType::f32, DType::f16, 1, 4, 33, Layout::contiguous, Layout::strided_dim},
    {"added", DType::f32, DType::f32, 2, 4, 24, Layout::contiguous, Layout::contiguous, true},
    {"added_to_some_heads", DType::f32, DType::f32, 2, 4, 5, Layout::contiguous, Layout::padded_rows, true},
};

class GpuRankMemory : public ::testing::TestWithParam<RowsCase> {};

TEST_P(GpuRankMemory, MovesRowsAsTheHost) {
  const RowsCase& c = GetParam();
  constexpr int64_t kFromRows = 900, kToRows = 1100;
  // More moves than a launch has, of one row and of many, with steps, without rows, and in no order. Each row of `to`
  // is written once.
  std::vector<RowMove> moves;
  int64_t to = 0;
  for (int64_t n = 0; to + 30 < kToRows; ++n) {
    const int64_t count = n % 7 == 3 ? 0 : 1 + n * 5 % 6, step = 1 + n % 3;
    moves.push_back({.from = n * 37 % 800, .from_step = 1 + n % 4, .to = to, .to_step = step, .count = count});
    to += count * step + n % 2;
  }
  std::swap(moves[1], moves[70]);
  ASSERT_GT(moves.size(), 128u);
  for (const bool one : {false, true}) {
    const std::vector<RowMove> taken =
        one ? std::vector<RowMove>{{.from = 3, .to = 5, .to_step = 2, .count = 400}} : moves;
    const HostTensor from = drawn(c.from, {c.B, kFromRows, c.H, c.D}, c.from_layout, 1);
    HostTensor right = drawn(c.to, {c.B, kToRows, c.H, c.D}, c.to_layout, 2), found = right;
    const DeviceTensor from_there(from), found_there(found);
    const auto run = [&](Memory& memory, const TensorView& x, const TensorView& y) {
      if (c.add) {
        memory.add_rows(x, y, taken);
      } else {
        memory.copy_rows(x, y, taken);
      }
    };
    run(distributed::host_memory(), from.view(), right.view());
    const auto memory = distributed::memory_on(Device::cuda);
    const DeviceStream stream;
    memory->use_stream(stream.get());
    run(*memory, from_there.view(), found_there.view());
    stream.synchronize();
    found_there.read(found);
    EXPECT_TRUE(found.same_bits(right)) << (one ? "one move" : "many moves");
    EXPECT_EQ(found.damage(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuRankMemory, ::testing::ValuesIn(kRowsCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GpuRankMemory, FillsAndAddsAndKeepsWhatItTook) {
  const auto memory = distributed::memory_on(Device::cuda);
  const DeviceStream stream;
  memory->use_stream(stream.get());
  constexpr std::size_t kCount = 3 * 1024 * 1024 + 5;
  {
    Buffer buffer(*memory), other(*memory);
    auto* const sum = reinterpret_cast<float*>(buffer.get(kCount * sizeof(float)));
    auto* const x = reinterpret_cast<float*>(other.get(kCount * sizeof(float)));
    memory->fill({sum, kCount}, -INFINITY);
    memory->fill({sum + 1, kCount - 2}, 0.1f);
    memory->fill({x, kCount}, 0.2f);
    memory->add({sum, kCount}, {x, kCount});
    memory->end_of_call();
    EXPECT_EQ(buffer.get(8), reinterpret_cast<std::byte*>(sum));
    std::vector<float> found(kCount);
    memory->read(found.data(), sum, kCount * sizeof(float));
    EXPECT_EQ(found.front(), -INFINITY);
    EXPECT_EQ(found.back(), -INFINITY);
    for (std::size_t n = 1; n + 1 < kCount; ++n) ASSERT_EQ(found[n], 0.1f + 0.2f) << n;

    // A graph takes no memory, and says so before it is spoilt.
    std::string said;
    const DeviceGraph graph(stream, [&] {
      memory->fill({sum, kCount}, 7);
      try {
        Buffer(*memory).get(100);
      } catch (const RuntimeError& error) {
        said = error.what();
      }
      memory->end_of_call();
    });
    EXPECT_EQ(said,
              "[distributed] 100 bytes more are needed while the stream is captured, which takes no memory: make such "
              "a call once before the capture");
    graph.replay(stream);
    memory->read(found.data(), sum, kCount * sizeof(float));
    EXPECT_EQ(found.back(), 7);
    // What a captured call used stays, since its graph may be replayed: nobody else has it.
    Buffer third(*memory);
    auto* const grown = reinterpret_cast<float*>(buffer.get(2 * kCount * sizeof(float)));
    auto* const taken = reinterpret_cast<float*>(third.get(kCount * sizeof(float)));
    memory->fill({grown, 2 * kCount}, 3);
    memory->fill({taken, kCount}, 4);
    graph.replay(stream);
    for (const auto& [from, value] : {std::pair{grown, 3.0f}, {grown + kCount, 3.0f}, {taken, 4.0f}, {x, 0.2f}}) {
      memory->read(found.data(), from, kCount * sizeof(float));
      EXPECT_EQ(std::ranges::count(found, value), static_cast<std::ptrdiff_t>(kCount)) << value;
    }
  }
  stream.synchronize();
}

}  // namespace
}  // namespace heddle::kit

// Attention over lists by Hopper's dense kernels: their bits where lists name all blocks, and that nothing is read into
// a result but what a list names. The table's cases are in sparse_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gpu/device_backward.h"
#include "heddle/sparse.h"

namespace heddle::kit {
namespace {

struct Shape {
  std::int64_t B, H, Hkv, Sq, Sk, D;
  std::int64_t block, query_rows, units;
  Causal causal = Causal::none;
  std::int64_t window_left = -1, window_right = -1;
  DType dtype = DType::bf16;

  std::int64_t lists() const { return (Sq + query_rows - 1) / query_rows; }
  std::int64_t blocks() const { return (Sk + block - 1) / block; }
};

HostTensor drawn(DType dtype, std::vector<std::int64_t> shape, std::mt19937& random) {
  std::normal_distribution<float> normal;
  HostTensor x = HostTensor::input(dtype, std::move(shape));
  for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
  return x;
}

// The call's inputs on the host, where tests change them.
struct Inputs {
  Shape s;
  HostTensor q, k, v, d_o, blocks;

  Inputs(const Shape& shape, std::int64_t entries, unsigned seed) : s(shape) {
    std::mt19937 random(seed);
    q = drawn(s.dtype, {s.B, s.Sq, s.H, s.D}, random);
    k = drawn(s.dtype, {s.B, s.Sk, s.Hkv, s.D}, random);
    v = drawn(s.dtype, {s.B, s.Sk, s.Hkv, s.D}, random);
    d_o = drawn(s.dtype, {s.B, s.Sq, s.H, s.D}, random);
    blocks = HostTensor::input(DType::i32, {s.B, s.lists(), s.units, entries});
  }
  std::int64_t entries() const { return blocks.view().shape[3]; }
  AttentionOptions options() const {
    AttentionOptions options;
    options.causal = s.causal;
    options.window_left = s.window_left;
    options.window_right = s.window_right;
    return options;
  }
};

struct Results {
  ForwardOutputs forward;
  Gradients gradients;
};

// Of attention over lists, or dense attention, by this candidate; gradients with sums in one order if `deterministic`.
Results results_of(const Inputs& in, const std::string& name, bool dense, bool deterministic) {
  const Shape& s = in.s;
  Results out{{HostTensor::output(s.dtype, {s.B, s.Sq, s.H, s.D}), HostTensor::output(DType::f32, {s.B, s.H, s.Sq})},
              {HostTensor::output(s.dtype, {s.B, s.Sq, s.H, s.D}),
               HostTensor::output(s.dtype, {s.B, s.Sk, s.Hkv, s.D}),
               HostTensor::output(s.dtype, {s.B, s.Sk, s.Hkv, s.D}),
               {},
               {}}};
  const DeviceTensor q(in.q), k(in.k), v(in.v), d_o(in.d_o), blocks(in.blocks);
  DeviceTensor o(out.forward.o), lse(out.forward.lse), dq(out.gradients.dq), dk(out.gradients.dk), dv(out.gradients.dv);
  BlockLists lists;
  lists.blocks = blocks.view();
  lists.block_size = s.block;
  lists.query_rows = s.query_rows;
  AttentionOptions options = in.options();
  options.force = name;
  const AttentionGradients to{dq.view(), dk.view(), dv.view(), {}, {}};
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  {
    const DeviceMemory memory(dense ? attention_forward_workspace(q.view(), k.view(), v.view(), options)
                                    : sparse_attention_forward_workspace(q.view(), k.view(), v.view(), lists, options),
                              0xFF);
    runtime.workspace = {memory.data(), memory.bytes()};
    if (dense) {
      attention_forward(q.view(), k.view(), v.view(), o.view(), lse.view(), options, runtime);
    } else {
      sparse_attention_forward(q.view(), k.view(), v.view(), lists, o.view(), lse.view(), options, runtime);
    }
    stream.synchronize();
  }
  options.deterministic = deterministic;
  const DeviceMemory memory(dense
                                ? attention_backward_workspace(q.view(), k.view(), v.view(), to, options)
                                : sparse_attention_backward_workspace(q.view(), k.view(), v.view(), lists, to, options),
                            0xFF);
  runtime.workspace = {memory.data(), memory.bytes()};
  if (dense) {
    attention_backward(q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}, to, options, runtime);
  } else {
    sparse_attention_backward(q.view(), k.view(), v.view(), lists, o.view(), lse.view(), d_o.view(), {}, to, options,
                              runtime);
  }
  stream.synchronize();
  o.read(out.forward.o);
  lse.read(out.forward.lse);
  dq.read(out.gradients.dq);
  dk.read(out.gradients.dk);
  dv.read(out.gradients.dv);
  return out;
}

bool runs(const Inputs& in) {
  BlockLists lists;
  const DeviceTensor q(in.q), k(in.k), blocks(in.blocks);
  lists.blocks = blocks.view();
  lists.block_size = in.s.block;
  lists.query_rows = in.s.query_rows;
  for (const Candidate& c : explain_sparse_attention(q.view(), k.view(), k.view(), lists, in.options())) {
    if (c.name != "sm90_tiles") continue;
    EXPECT_TRUE(c.supported || c.reason.starts_with("it needs a Hopper GPU")) << c.reason;
    return c.supported;
  }
  return false;
}

// All blocks, in an order of each list's own, some of them twice.
void name_all(Inputs& in) {
  const std::int64_t blocks = in.s.blocks();
  for (std::int64_t n = 0; n < in.blocks.elements(); ++n) {
    const std::int64_t list = n / in.entries(), slot = n % in.entries();
    in.blocks.set(n, static_cast<double>((blocks - 1 - slot % blocks + list) % blocks));
  }
}

class GpuSparseTilesDense : public ::testing::TestWithParam<Shape> {};

// Tiles come in the dense kernels' order, so bits are theirs. Sums of dq: the last tile of keys first, as the dense
// kernel has it under a causal mask; without one, of what has no order of sums, dk and dv.
TEST_P(GpuSparseTilesDense, AllBlocksGiveTheBitsOfNoLists) {
  Inputs in(GetParam(), GetParam().blocks() + 3, 1);
  name_all(in);
  if (!runs(in)) GTEST_SKIP() << "this GPU does not run it";
  const bool causal = GetParam().causal != Causal::none;
  const Results expected = results_of(in, "sm90", true, causal), found = results_of(in, "sm90_tiles", false, causal);
  expect_finite(found.forward);
  expect_finite(found.gradients);
  EXPECT_TRUE(expected.forward.o.same_bits(found.forward.o)) << "o";
  EXPECT_TRUE(expected.forward.lse.same_bits(found.forward.lse)) << "lse";
  EXPECT_TRUE(expected.gradients.dk.same_bits(found.gradients.dk)) << "dk";
  EXPECT_TRUE(expected.gradients.dv.same_bits(found.gradients.dv)) << "dv";
  if (causal) {
    EXPECT_TRUE(expected.gradients.dq.same_bits(found.gradients.dq)) << "dq";
  } else {
    EXPECT_TRUE(close(expected.gradients, found.gradients));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuSparseTilesDense,
    ::testing::Values(Shape{2, 4, 4, 1000, 1300, 128, 128, 128, 4}, Shape{1, 4, 2, 3000, 3000, 128, 128, 256, 1},
                      Shape{1, 4, 4, 2048, 2048, 128, 128, 128, 4, Causal::bottom_right},
                      Shape{2, 6, 2, 1500, 1700, 64, 128, 128, 2, Causal::bottom_right},
                      Shape{1, 4, 2, 700, 2100, 64, 128, 384, 1, Causal::none, 500, 300, DType::f16}));

// Entries drawn at random, -1 and blocks that are not there among them; every seventh list is empty.
void name_some(Inputs& in, unsigned seed) {
  std::mt19937 random(seed);
  for (std::int64_t n = 0; n < in.blocks.elements(); ++n) {
    const auto block = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(in.s.blocks() + 2)) - 1;
    in.blocks.set(n, n / in.entries() % 7 == 3 ? -1.0 : static_cast<double>(block));
  }
}

// Whether each row is, but for rounding, what another kernel has; NaN is not.
bool near(const HostTensor& x, const HostTensor& y, std::int64_t width) {
  const std::vector<double> first = x.values(), second = y.values();
  double all = 0;
  for (const double value : first) all += value * value;
  const double mean = all * static_cast<double>(width) / static_cast<double>(first.size());
  for (std::size_t row = 0; row < first.size(); row += static_cast<std::size_t>(width)) {
    double difference = 0, size = mean;
    for (std::size_t n = row; n < row + static_cast<std::size_t>(width); ++n) {
      difference += (first[n] - second[n]) * (first[n] - second[n]);
      size += first[n] * first[n];
    }
    if (!(difference <= 0.02 * 0.02 * size)) return false;
  }
  return true;
}
void expect_near(const Gradients& x, const Gradients& y, std::int64_t width) {
  EXPECT_TRUE(near(x.dq, y.dq, width)) << "dq";
  EXPECT_TRUE(near(x.dk, y.dk, width)) << "dk";
  EXPECT_TRUE(near(x.dv, y.dv, width)) << "dv";
}

class GpuSparseTiles : public ::testing::TestWithParam<Shape> {};

// Many tiles a CTA, lists of many lengths: what the kernels say that gather rows, and the same bits every time.
TEST_P(GpuSparseTiles, AgreesWithTheKernelsThatGatherRows) {
  Inputs in(GetParam(), std::max<std::int64_t>(GetParam().blocks() / 4, 2), 3);
  name_some(in, 4);
  if (!runs(in)) GTEST_SKIP() << "this GPU does not run it";
  const Results expected = results_of(in, "sm80", false, false), found = results_of(in, "sm90_tiles", false, true);
  expect_finite(found.gradients);
  expect_finite(found.forward);
  EXPECT_TRUE(near(expected.forward.o, found.forward.o, GetParam().D));
  expect_near(expected.gradients, found.gradients, GetParam().D);
  for (int round = 0; round < 5; ++round) {
    const Results again = results_of(in, "sm90_tiles", false, true);
    EXPECT_TRUE(same_bits(found.forward, again.forward)) << "round " << round;
    EXPECT_TRUE(same_bits(found.gradients, again.gradients)) << "round " << round;
  }
  expect_near(expected.gradients, results_of(in, "sm90_tiles", false, false).gradients, GetParam().D);
}

// What nobody meets may hold anything: keys, and rows without a key, by lists, causality and windows together.
TEST_P(GpuSparseTiles, WhatNobodyMeetsIsNotRead) {
  const Shape& s = GetParam();
  Inputs in(s, 2, 5);
  name_some(in, 6);
  if (!runs(in)) GTEST_SKIP() << "this GPU does not run it";
  std::vector<bool> row_meets(static_cast<std::size_t>(s.B * s.Sq * s.H)),
      key_meets(static_cast<std::size_t>(s.B * s.Sk * s.Hkv));
  const std::int64_t off = s.causal == Causal::top_left ? 0 : s.Sk - s.Sq;
  for (std::int64_t b = 0; b < s.B; ++b) {
    for (std::int64_t i = 0; i < s.Sq; ++i) {
      std::int64_t begin = 0, end = s.Sk;
      if (s.window_left >= 0) begin = std::max(begin, i + off - s.window_left);
      if (s.window_right >= 0) end = std::min(end, i + off + s.window_right + 1);
      if (s.causal != Causal::none) end = std::min(end, i + off + 1);
      for (std::int64_t h = 0; h < s.H; ++h) {
        const std::int64_t list = (b * s.lists() + i / s.query_rows) * s.units + h * s.units / s.H;
        for (std::int64_t n = 0; n < in.entries(); ++n) {
          const auto block = static_cast<std::int64_t>(in.blocks.get(list * in.entries() + n));
          if (block < 0) continue;
          const std::int64_t to = std::min(end, (block + 1) * s.block);
          for (std::int64_t j = std::max(begin, block * s.block); j < to; ++j) {
            row_meets[static_cast<std::size_t>((b * s.Sq + i) * s.H + h)] = true;
            key_meets[static_cast<std::size_t>((b * s.Sk + j) * s.Hkv + h / (s.H / s.Hkv))] = true;
          }
        }
      }
    }
  }
  ASSERT_TRUE(std::ranges::count(row_meets, false) > 0 && std::ranges::count(key_meets, false) > 0);
  const auto with = [&](double value) {
    Inputs x = in;
    const auto fill = [&](HostTensor& tensor, const std::vector<bool>& meets) {
      for (std::int64_t n = 0; n < tensor.elements(); ++n) {
        if (!meets[static_cast<std::size_t>(n / s.D)]) tensor.set(n, value);
      }
    };
    fill(x.q, row_meets);
    fill(x.d_o, row_meets);
    fill(x.k, key_meets);
    fill(x.v, key_meets);
    return results_of(x, "sm90_tiles", false, true);
  };
  const Results zeros = with(0), anything = with(std::numeric_limits<double>::quiet_NaN());
  expect_finite(anything.gradients);
  EXPECT_TRUE(same_bits(zeros.forward, anything.forward));
  EXPECT_TRUE(same_bits(zeros.gradients, anything.gradients));
  for (std::int64_t n = 0; n < s.B * s.Sq * s.H * s.D; ++n) {
    if (row_meets[static_cast<std::size_t>(n / s.D)]) continue;
    ASSERT_EQ(anything.forward.o.get(n), 0) << n;
    ASSERT_EQ(anything.gradients.dq.get(n), 0) << n;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuSparseTiles,
    ::testing::Values(Shape{1, 8, 8, 4000, 4000, 128, 128, 128, 8}, Shape{2, 8, 2, 2000, 2500, 128, 128, 128, 2},
                      Shape{1, 8, 4, 4096, 4096, 128, 64, 128, 4, Causal::bottom_right},
                      Shape{1, 6, 2, 2000, 2000, 128, 64, 128, 6, Causal::top_left, 900},
                      Shape{2, 4, 2, 1900, 1500, 64, 128, 128, 4, Causal::none, 300, 200},
                      Shape{1, 8, 2, 3000, 3333, 64, 64, 256, 1, Causal::bottom_right, 1000, -1, DType::f16},
                      Shape{1, 8, 2, 1500, 2000, 128, 128, 64, 2, Causal::bottom_right, 40},
                      Shape{1, 8, 4, 2500, 2500, 72, 64, 128, 4, Causal::none, 30, 30}));

}  // namespace
}  // namespace heddle::kit

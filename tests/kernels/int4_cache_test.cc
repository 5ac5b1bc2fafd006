// The cache in 4 bits on the CPU: what appends store, attention over it by every candidate, and what is refused.
#include "heddle/int4_cache.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/dtypes.h"
#include "heddle/error.h"
#include "kernels/candidates.h"
#include "kit/int4_case.h"
#include "problem/int4_rows.h"

namespace heddle::kit {
namespace {

TEST(Int4Cache, CountsBlocks) {
  for (const auto& [keys, blocks] : {std::pair{0, 0}, {64, 0}, {127, 0}, {128, 1}, {191, 1}, {192, 2}, {8192, 127}}) {
    EXPECT_EQ(int4_cache_blocks(keys), blocks) << keys;
  }
  EXPECT_EQ(int4_cache_block_bytes(128, 128), 9216);
}

// Every code of a block has a place of its own, inside the codes.
TEST(Int4Cache, CodesDoNotShareBits) {
  for (const auto& [D, Dv] : {std::pair{64, 64}, {128, 192}}) {
    const Int4Block format{D, Dv};
    std::vector<int> bits(static_cast<std::size_t>(format.k_scales()));
    for (std::int64_t key = 0; key < kInt4Keys; ++key) {
      for (std::int64_t d = 0; d < D; ++d) bits[format.k_code(key, d)] += 1 << Int4Block::k_bit(key, d);
      for (std::int64_t d = 0; d < Dv; ++d) bits[format.v_code(key, d)] += 1 << Int4Block::v_bit(key, d);
    }
    for (const int byte : bits) ASSERT_EQ(byte, 0x11);
    EXPECT_EQ(format.bytes(), 36 * D + (32 + 4) * Dv);
  }
}

class Int4CacheTest : public ::testing::TestWithParam<Int4Spec> {};

// Blocks hold each key to half a step, rings bit for bit, and nothing else is written, whatever the appends' lengths.
TEST_P(Int4CacheTest, AppendsStoreWhatTheyGet) {
  const Int4Case c(GetParam());
  const Int4Case untouched(GetParam());
  c.fill_cache_on_cpu();
  EXPECT_EQ(c.k_tail.damage() + c.v_tail.damage(), "");
  const AttentionProblem p = c.problem();
  const Int4Block format{p.D, p.Dv};
  std::vector<bool> written(static_cast<std::size_t>(c.blocks.elements()));
  for (std::int64_t b = 0; b < p.B; ++b) {
    const std::int64_t length = c.spec.lengths[b], end = int4_blocks(length);
    for (std::int64_t h = 0; h < p.Hkv; ++h) {
      const auto value = [&](const HostTensor& x, std::int64_t j, std::int64_t d) {
        const auto& shape = x.view().shape;
        return x.get(((b * shape[1] + j) * shape[2] + h) * shape[3] + d);
      };
      for (std::int64_t n = 0; n < end; ++n) {
        const std::byte* block = p.int4_block(b, n, h);
        std::fill_n(written.begin() + (block - static_cast<const std::byte*>(c.blocks.view().data)), format.bytes(),
                    true);
        const auto half = [&](std::int64_t at) {
          std::uint16_t bits;
          std::memcpy(&bits, block + at, 2);
          return static_cast<double>(f16_to_f32(bits));
        };
        for (std::int64_t key = 0; key < kInt4Keys; ++key) {
          for (std::int64_t d = 0; d < p.D; ++d) {
            const double x = value(c.k_new, n * kInt4Keys + key, d);
            // The scale was rounded to 11 bits, by which the largest may be clipped.
            ASSERT_TRUE(std::abs(int4_element<double>(block, format, false, key, d) - x) <=
                        half(format.k_scales() + 2 * d) * (0.5 + 15 * 0x1p-11));
          }
          for (std::int64_t d = 0; d < p.Dv; ++d) {
            const double x = value(c.v_new, n * kInt4Keys + key, d);
            ASSERT_TRUE(std::abs(int4_element<double>(block, format, true, key, d) - x) <=
                        half(format.v_scales() + format.v_scale(key, d)) * (0.5 + 15 * 0x1p-11));
          }
        }
      }
      for (std::int64_t j = end * kInt4Keys; j < length; ++j) {
        for (std::int64_t d = 0; d < p.D; ++d) {
          ASSERT_EQ(load_element(p.k.at(c.row_of(b), j % kInt4Tail, h), p.k.dtype, d), value(c.k_new, j, d));
        }
        for (std::int64_t d = 0; d < p.Dv; ++d) {
          ASSERT_EQ(load_element(p.v.at(c.row_of(b), j % kInt4Tail, h), p.v.dtype, d), value(c.v_new, j, d));
        }
      }
    }
  }
  for (std::size_t n = 0; n < written.size(); ++n) {
    ASSERT_TRUE(written[n] || static_cast<const std::byte*>(c.blocks.view().data)[n] ==
                                  static_cast<const std::byte*>(untouched.blocks.view().data)[n]);
  }
}

TEST_P(Int4CacheTest, AttentionMatchesReference) {
  const Int4Case c(GetParam());
  c.fill_cache_on_cpu();
  AttentionOptions options = c.options();
  const auto attend = [&] {
    HostTensor o = c.new_o(), lse = c.new_lse();
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_over_int4_cache_workspace(c.q.view(), c.cache(), options));
    attention_over_int4_cache(c.q.view(), c.cache(), o.view(), lse.view(), options, runtime);
    EXPECT_EQ(c.verdict(o, lse), "");
  };
  options.force = "reference";
  attend();
  options.force = "cpu";
  on_each_target(attend);
}

INSTANTIATE_TEST_SUITE_P(Caches, Int4CacheTest, ::testing::ValuesIn(int4_specs(false)),
                         [](const auto& info) { return info.param.name; });

// A rotated append is apply_rotary and an append, also for rows that go into a block at once.
TEST(Int4Cache, RotatesNewKeys) {
  Int4Spec spec{.name = "rotated", .lengths = {300, 129}};
  const Int4Case c(spec);
  Int4Case apart(spec);
  HostTensor cos = HostTensor::input(DType::f32, {1024, 48}), sin = cos;
  for (std::int64_t n = 0; n < cos.elements(); ++n) cos.set(n, std::cos(0.1 * n)), sin.set(n, std::sin(0.1 * n));
  const Rotary rotary{cos.view(), sin.view(), true};
  c.fill_cache_on_cpu(rotary);
  apply_rotary(apart.k_new.view(), apart.k_new.view(), rotary, {}, {});
  apart.fill_cache_on_cpu();
  EXPECT_TRUE(c.k_tail.same_bits(apart.k_tail));
  EXPECT_TRUE(c.v_tail.same_bits(apart.v_tail));
  EXPECT_TRUE(c.blocks.same_bits(apart.blocks));
}

// NaN and infinity make their group NaN and no other; what float16 has not saturates; a constant group is exact.
TEST(Int4Cache, StoresExtremes) {
  Int4Spec spec{.name = "extremes", .Hkv = 1, .lengths = {200}};
  Int4Case c(spec);
  const auto k = [&](std::int64_t j, std::int64_t d, double x) { c.k_new.set(j * 128 + d, x); };
  k(3, 7, std::nan(""));
  k(5, 8, INFINITY);
  k(6, 9, 1e30);
  for (std::int64_t j = 0; j < 64; ++j) k(j, 10, -3.25);
  c.v_new.set(9 * 128 + 70, -INFINITY);
  c.fill_cache_on_cpu();
  const AttentionProblem p = c.problem();
  const auto key = [&](std::int64_t j) { return int4_row<double>(p, 0, p.sequence(0), j, 0, false); };
  const auto value = [&](std::int64_t j) { return int4_row<double>(p, 0, p.sequence(0), j, 0, true); };
  for (std::int64_t j = 0; j < 64; ++j) {
    EXPECT_TRUE(std::isnan(key(j)[7]) && std::isnan(key(j)[8]));
    EXPECT_TRUE(std::abs(key(j)[11]) < 8);
    EXPECT_EQ(key(j)[10], -3.25);
    for (std::int64_t d = 0; d < 128; ++d) EXPECT_EQ(std::isnan(value(j)[d]), j == 9 && d >= 64);
  }
  EXPECT_NEAR(key(6)[9], 65504, 40);
}

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define EXPECT_SAYS(call, part) EXPECT_PRED_FORMAT2(testing::IsSubstring, part, message([&] { call; }))

TEST(Int4Cache, RefusesBadArguments) {
  const Int4Case c(Int4Spec{.name = "bad", .paged = true});
  const auto append = [&](const Int4Cache& cache, std::vector<std::int64_t> before, std::int64_t count = 3) {
    TensorView k = c.k_new.view(), v = c.v_new.view();
    k.shape[1] = v.shape[1] = count;
    const HostTensor lengths = indices(before);
    append_int4_cache(k, v, cache, lengths.view(), {}, {});
  };
  Int4Cache cache = c.cache();
  EXPECT_SAYS(append(cache, {0, 0, -1}), "[append_int4_cache] seqlens[2] is -1: it must be at least 0");
  EXPECT_SAYS(append(cache, {0, 893, 0}),
              "seqlens[1] is 893: with 3 rows sequence 1 ends at position 896, and the "
              "cache's sequences hold 895");
  EXPECT_SAYS(append(cache, {0, 0}), "seqlens has 2 entries: it must have 3");
  HostTensor pages = c.page_table;
  pages.set(0, 39);
  cache.page_table = pages.view();
  EXPECT_SAYS(append(cache, {127, 0, 0}), "page_table[0, 0] is 39: it must be from 0 to 38");
  append(cache, {0, 0, 0});  // that page is not needed yet
  pages.set(0, pages.get(12));
  EXPECT_SAYS(append(cache, {127, 127, 0}), "sequences 0 and 1 both write to page");
  cache = c.cache();
  const HostTensor rows = indices({0, 2, 0});
  cache.row_idx = rows.view();
  EXPECT_SAYS(append(cache, {0, 0, 0}), "sequences 0 and 2 both write to row 0: they must have their own");
  const HostTensor beyond = indices({0, 3, 1});
  cache.row_idx = beyond.view();
  EXPECT_SAYS(append(cache, {0, 0, 0}), "row_idx[1] is 3: it must be from 0 to 2");
  cache = c.cache();
  cache.v_tail = cache.k_tail;
  EXPECT_SAYS(append(cache, {0, 0, 0}), "v_tail shares memory with k_tail: both are written");
  cache = c.cache();
  --cache.blocks.shape[2];
  EXPECT_SAYS(append(cache, {0, 0, 0}), "its last extents must be Hkv and the bytes of a block, 2 and 9216");
  cache = c.cache();
  cache.blocks.data = static_cast<std::byte*>(cache.blocks.data) + 8;
  EXPECT_SAYS(append(cache, {0, 0, 0}), "blocks must be contiguous, each beginning at a multiple of 16 bytes");
  cache = c.cache();
  cache.k_tail.shape[1] = 127;
  EXPECT_SAYS(append(cache, {0, 0, 0}), "it must have 128 slots");

  HostTensor o = c.new_o();
  const auto attend = [&](auto change) {
    AttentionOptions options = c.options();
    change(options);
    attention_over_int4_cache(c.q.view(), c.cache(), o.view(), {}, options, {});
  };
  EXPECT_SAYS(attend([](auto& x) { x.seqused_k = {}; }), "seqused_k is missing");
  EXPECT_SAYS(attend([&](auto& x) { x.page_table = c.page_table.view(); }), "are taken from the cache");
  EXPECT_SAYS(attend([](auto& x) { x.q_step = 2; }), "q_step is 2 and key_step is 1: both must be 1, as positions are");
  EXPECT_SAYS(attend([](auto& x) { x.force = "cpu_baseline"; }), "it does not read a cache in 4 bits");
  // Each slot of the ring is read, not the first alone.
  TensorView inside = o.view();
  inside.data = static_cast<std::byte*>(c.cache().k_tail.data) + 5 * c.spec.Hkv * c.spec.D * size_of(c.spec.dtype);
  EXPECT_SAYS(attention_over_int4_cache(c.q.view(), c.cache(), inside, {}, c.options(), {}),
              "o shares memory with k_tail");
  const HostTensor longer = indices({896, 0, 0});
  EXPECT_SAYS(attend([&](auto& x) { x.seqused_k = longer.view(); }), "seqused_k[0] is 896: it must be from 0 to");
}

TEST(Int4Cache, ExplainsItsCandidates) {
  const Int4Case c(Int4Spec{.name = "explained"});
  std::string supported;
  for (const Candidate& candidate : explain_attention_over_int4_cache(c.q.view(), c.cache(), c.options())) {
    if (candidate.supported) supported += candidate.name + (candidate.chosen ? "* " : " ");
  }
  EXPECT_EQ(supported, "cpu* reference ");
}

}  // namespace
}  // namespace heddle::kit

// Cases of select_blocks, and what makes a list right.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/dtypes.h"
#include "heddle/nsa.h"
#include "kit/host_tensor.h"
#include "kit/indices.h"
#include "ops/nsa/nsa.h"
#include "reference/nsa.h"

namespace heddle::kit {

using std::int64_t;

struct SelectCase {
  const char* name;
  DType dtype;
  int64_t B, H, Hkv, Sq, N, D, n;
  int64_t block = 64, l = 0, d = 0;
  ForcedBlocks forced = {};
  std::vector<int64_t> q_offset = {};
  int64_t q_step = 1;
  std::vector<int64_t> starts_q = {}, starts_k = {}, used = {};
  bool lse = false;
  Layout layout = Layout::contiguous;
  float scale = 0;  // 0: not given
};
inline void PrintTo(const SelectCase& c, std::ostream* out) { *out << c.name; }

inline constexpr ForcedBlocks kNone{.first = false, .previous = false, .current = false};

inline const std::vector<SelectCase>& select_cases() {
  using enum DType;
  static const std::vector<SelectCase> all = {
      {"plain", f32, 2, 4, 2, 300, 18, 64, 4, 16},
      {"with_lse", f32, 2, 4, 2, 300, 18, 64, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"bf16", bf16, 1, 8, 2, 700, 43, 128, 8, 16},
      {"f16", f16, 1, 8, 2, 200, 12, 40, 3, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"group_of_1", f32, 1, 3, 3, 200, 12, 32, 5, 16},
      {"group_of_3", bf16, 2, 6, 2, 150, 9, 48, 4, 16, 0, 0, kNone},
      {"group_of_16", f32, 1, 32, 2, 130, 8, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true},
      {"one_dim", f32, 1, 4, 2, 200, 12, 1, 5, 16, 0, 0, kNone},
      {"odd_dims", f32, 1, 4, 2, 200, 12, 13, 5, 16},
      {"odd_dims_bf16", bf16, 1, 4, 2, 200, 12, 131, 5, 16},
      {"widest", f16, 1, 2, 1, 150, 9, 256, 5, 16},
      {"paper", f32, 1, 4, 1, 700, 42, 32, 6, 64, 32, 16},
      {"paper_with_lse", bf16, 1, 4, 1, 700, 42, 64, 6, 64, 32, 16, kNone, {}, 1, {}, {}, {}, true},
      {"paper_over_tiles", f32, 1, 2, 1, 150, 300, 16, 9, 32, 32, 16, {}, {4700}},
      {"compressed_wider_than_blocks", f32, 1, 2, 1, 500, 59, 16, 5, 16, 40, 8, {}},
      {"far_wider", f32, 1, 2, 1, 300, 260, 16, 5, 16, 500, 4, kNone, {1200}},
      {"strides_of_1", f32, 1, 2, 1, 300, 298, 16, 3, 128, 3, 1, kNone},
      {"smaller_compressed", f32, 2, 4, 2, 300, 37, 24, 3, 64, 8, 8},
      {"offset", f32, 3, 4, 2, 40, 60, 32, 7, 16, 0, 0, {}, {0, 100, 3000}},
      {"step", f32, 2, 4, 2, 70, 60, 32, 7, 16, 0, 0, {}, {3, 0}, 13},
      {"one_row", bf16, 2, 8, 2, 1, 200, 64, 16, 64, 0, 0, {}, {12799, 6000}},
      {"few_rows", f32, 2, 40, 2, 3, 200, 24, 6, 16, 0, 0, {}, {3000, 900}, 50},
      {"few_rows_paper", bf16, 1, 14, 2, 2, 300, 40, 5, 64, 32, 16, kNone, {4000}, 500, {}, {}, {}, true},
      {"many_slots", f32, 1, 4, 2, 200, 12, 32, 40, 16},
      {"one_slot", f32, 1, 4, 2, 200, 12, 32, 1, 16, 0, 0, kNone},
      {"one_slot_forced", f32, 1, 4, 2, 200, 12, 32, 1, 16},
      {"two_slots_forced", f32, 1, 4, 2, 200, 12, 32, 2, 16},
      {"no_slots", f32, 1, 4, 2, 20, 1, 32, 0, 16},
      {"current_alone", f32, 1, 4, 2, 200, 12, 32, 4, 16, 0, 0, {.first = false, .previous = false}},
      {"no_keys", f32, 1, 4, 2, 20, 0, 32, 4, 64},
      {"no_rows", f32, 1, 4, 2, 0, 3, 32, 4, 64},
      {"used", f32, 3, 4, 2, 200, 12, 32, 4, 16, 0, 0, {}, {}, 1, {}, {}, {0, 5, 12}},
      {"packed",
       f32,
       5,
       4,
       2,
       300,
       18,
       32,
       4,
       16,
       0,
       0,
       {},
       {},
       1,
       {0, 0, 15, 90, 90, 300},
       {0, 0, 0, 5, 5, 18},
       {0, 0, 4, 0, 13}},
      {"packed_lse",
       bf16,
       4,
       4,
       1,
       300,
       18,
       64,
       4,
       32,
       32,
       16,
       {},
       {},
       1,
       {0, 100, 131, 180, 300},
       {0, 6, 8, 11, 18},
       {5, 0, 2, 6},
       true},
      {"packed_rows_over_batched_keys", f32, 2, 4, 2, 90, 8, 32, 4, 16, 0, 0, {}, {30, 0}, 2, {0, 50, 90}},
      {"heads_first", f32, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true, Layout::heads_first},
      {"padded", bf16, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, true, Layout::padded_rows},
      {"every_third", f16, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::strided_dim},
      {"backwards", f32, 2, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::reversed},
      {"negative_scale",   f32,  1, 4, 2, 200, 12, 24, 4, 16, 0, 0, {}, {}, 1, {}, {}, {}, false,
       Layout::contiguous, -0.3f},
      {"large_scores", f32, 1, 4, 2, 400, 25, 64, 6, 16, 0, 0, {}, {}, 1, {}, {}, {}, false, Layout::contiguous, 3.0f},
  };
  return all;
}

struct SelectData {
  explicit SelectData(const SelectCase& spec) : s(spec) {
    const auto shape = [](bool packed, int64_t batch, int64_t rows, int64_t heads, int64_t width) {
      return packed ? std::vector{rows, heads, width} : std::vector{batch, rows, heads, width};
    };
    q = HostTensor::input(s.dtype, shape(packed(), s.B, s.Sq, s.H, s.D), s.layout);
    k = HostTensor::input(s.dtype, shape(!s.starts_k.empty(), s.B, s.N, s.Hkv, s.D), s.layout);
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    for (HostTensor* x : {&q, &k}) {
      for (int64_t n = 0; n < x->elements(); ++n) x->set(n, normal(random));
    }
    if (s.lse) lse = HostTensor::input(DType::f32, packed() ? std::vector{s.H, s.Sq} : std::vector{s.B, s.H, s.Sq});
    options.block_size = s.block;
    options.compression_block = s.l;
    options.compression_stride = s.d;
    options.forced = s.forced;
    options.q_step = s.q_step;
    if (s.scale != 0) options.scale = s.scale;
    const auto give = [&](TensorView& to, HostTensor& from, const std::vector<int64_t>& values) {
      if (!values.empty()) from = indices(values), to = from.view();
    };
    give(options.q_offset, q_offset, s.q_offset);
    give(options.cu_seqlens_q, starts_q, s.starts_q);
    give(options.cu_seqlens_k, starts_k, s.starts_k);
    give(options.seqused_k, used, s.used);
    if (s.lse) fill_lse();
  }
  SelectData(const SelectData&) = delete;  // options are views of its own tensors

  bool packed() const { return !s.starts_q.empty(); }
  HostTensor lists() const {
    return HostTensor::output(DType::i32, packed() ? std::vector{s.Sq, s.Hkv, s.n} : std::vector{s.B, s.Sq, s.Hkv, s.n},
                              s.layout == Layout::heads_first ? Layout::heads_first : Layout::contiguous);
  }
  SelectProblem problem(const HostTensor& blocks) const {
    return checked_select_problem(Check("select_blocks"), q.view(), k.view(), lse.view(), blocks.view(), options);
  }
  HostTensor run(const std::string& candidate, Executor* executor = nullptr) const {
    HostTensor blocks = lists();
    SelectOptions with = options;
    with.force = candidate;
    Runtime runtime;
    runtime.executor = executor;
    WorkspaceBuffer buffer;
    const std::size_t bytes = select_blocks_workspace(q.view(), k.view(), lse.view(), blocks.view(), with, runtime);
    if (bytes > 0) {  // what it held before must not matter
      runtime.workspace = {buffer.get(bytes).data, bytes};
      std::memset(runtime.workspace.data, 0xFF, bytes);
    }
    select_blocks(q.view(), k.view(), lse.view(), blocks.view(), with, runtime);
    EXPECT_EQ(blocks.damage(), "");
    return blocks;
  }
  double dot(const SelectProblem& p, int64_t b, const Sequence& x, int64_t i, int64_t h, int64_t c,
             bool absolute) const {
    double sum = 0;
    for (int64_t n = 0; n < p.D; ++n) {
      const double term = load_element(p.q.at(b, x.q_begin + i, h), p.dtype, n * p.q.stride_d) *
                          load_element(p.key_row(p.k, b, x, c, h / p.G), p.dtype, n * p.k.stride_d);
      sum += absolute ? std::abs(term) : term;
    }
    return sum;
  }

  // By what share of itself a block's score in f32 may be off. Roundings of D products that are summed, and of lse,
  // which sums over what is seen; both go into an exponent. Then the exponential's own, and sums over heads and pooled
  // keys.
  double uncertainty(const SelectProblem& p, int64_t b, const Sequence& x, int64_t i, int64_t kv_head) const {
    double size = 0;
    for (int64_t h = kv_head * p.G; h < (kv_head + 1) * p.G; ++h) {
      for (int64_t c = 0; c < p.seen(x, p.position(x, i)); ++c) size = std::max(size, dot(p, b, x, i, h, c, true));
    }
    const double exponent = 2 * static_cast<double>(p.D + 4) * std::abs(p.scale) * size;
    return (exponent + static_cast<double>(x.sk + p.G + p.wide() + p.narrow()) + 32) * 0x1p-24;
  }

  const SelectCase s;
  HostTensor q, k, lse, q_offset, starts_q, starts_k, used;
  SelectOptions options;

 private:
  void fill_lse() {
    for (int64_t n = 0; n < lse.elements(); ++n) lse.set(n, 0);
    const HostTensor blocks = lists();
    const SelectProblem p = problem(blocks);
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence x = p.sequence(b);
      for (int64_t i = 0; i < x.q_rows; ++i) {
        for (int64_t h = 0; h < p.H; ++h) {
          double sum = 0;
          for (int64_t c = 0; c < p.seen(x, p.position(x, i)); ++c)
            sum += std::exp(p.scale * dot(p, b, x, i, h, c, false));
          p.lse.as<float>()[p.lse.offset(b, h, x.q_begin + i)] = static_cast<float>(std::log(sum));
        }
      }
    }
  }
};

// Whether `list` is right if scores may be off by `relative` of themselves.
inline void expect_list(const SelectProblem& p, const std::int32_t* list, int64_t t, const std::vector<double>& scores,
                        double relative) {
  const SelectProblem::Forced forced = p.forced_at(t);
  int64_t expected = forced.count;  // entries
  for (int64_t j = 0; j < std::ssize(scores); ++j) expected += !forced.holds(j);
  expected = std::min(expected, p.slots);
  std::set<std::int32_t> listed;
  double before = std::numeric_limits<double>::infinity();
  for (int64_t n = 0; n < p.slots; ++n) {
    if (n >= expected) {
      ASSERT_EQ(list[n], -1) << "slot " << n;
      continue;
    }
    ASSERT_TRUE(listed.insert(list[n]).second) << "slot " << n << " is there twice: " << list[n];
    if (n < forced.count) {
      ASSERT_EQ(list[n], forced.blocks[n]) << "slot " << n;
      continue;
    }
    ASSERT_TRUE(list[n] >= 0 && list[n] < std::ssize(scores)) << "slot " << n << ": " << list[n];
    const double score = scores[list[n]];
    ASSERT_LE(score, before + relative * (score + before)) << "slot " << n;
    before = score;
  }
  if (expected < p.slots || p.slots <= forced.count) return;
  for (int64_t j = 0; j < std::ssize(scores); ++j) {
    if (listed.contains(static_cast<std::int32_t>(j)) || forced.holds(j)) continue;
    ASSERT_LE(scores[j], before + relative * (scores[j] + before)) << "block " << j << " is not listed";
  }
}

}  // namespace heddle::kit

// The checks that a GPU runs in validate mode, run here thread by thread over memory of the host: over random index
// data, much of it wrong, they say what the operation throws on the CPU, word for word.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "heddle/attention.h"
#include "heddle/int4_cache.h"
#include "ops/attention/arguments.h"
#include "ops/kv_cache/arguments.h"
#include "ops/kv_cache/int4_cache.h"
#include "problem/call_indices.h"

namespace heddle {
namespace {

using Values = std::vector<std::int32_t>;

TensorView of(const Values& values, std::vector<std::int64_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
  TensorView view(values.data(), DType::i32, {0});
  view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = shape[static_cast<std::size_t>(i)];
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

// The host does not look into tensors on a GPU, and these here only say that they are there.
TensorView there(TensorView view) {
  if (view.given()) view.device = Device::cuda;
  return view;
}
AttentionOptions there(AttentionOptions options) {
  for (TensorView* view :
       {&options.cu_seqlens_q, &options.cu_seqlens_k, &options.seqused_q, &options.seqused_k, &options.page_table,
        &options.cache_batch_idx, &options.cache_leftpad, &options.q_offset, &options.key_offset, &options.bias}) {
    *view = there(*view);
  }
  return options;
}
Rotary there(Rotary rotary) { return {there(rotary.cos), there(rotary.sin), rotary.interleaved}; }
Int4Cache there(const Int4Cache& cache) {
  return {there(cache.blocks), there(cache.k_tail), there(cache.v_tail), there(cache.page_table), there(cache.row_idx)};
}

// What a GPU of so many warps and lanes finds.
template <class Indices>
std::string found_by(const Indices& indices, std::int64_t warps, std::int64_t lanes) {
  FirstBadIndex first;
  const auto all = [&](const auto& share) {
    for (std::int64_t thread = warps * lanes; thread-- > 0;) {
      const FirstBadIndex found = share(thread);
      first.note(found.place, found.bad);
    }
  };
  all([&](std::int64_t thread) { return check_share(indices, thread, warps, lanes); });
  if (indices.pieces() > 0 && pieces_come_first(first)) {
    all([&](std::int64_t thread) { return check_pieces(indices, thread, warps * lanes); });
  }
  return sentence(first.bad);
}

std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string what = error.what();
    return what.substr(what.find("] ") + 2);
  }
  return "";
}

// Compares the two and counts.
class Comparison {
 public:
  template <class Indices>
  void expect(const std::function<void()>& on_cpu, const Indices& indices) {
    const std::string expected = thrown_by(on_cpu);
    for (const auto& [warps, lanes] : {std::pair{1, 1}, {3, 5}, {16, 32}}) {
      ASSERT_EQ(found_by(indices, warps, lanes), expected) << warps << " warps of " << lanes;
    }
    ++(expected.empty() ? good_ : bad_);
  }
  ~Comparison() {
    EXPECT_GT(good_, 100);
    EXPECT_GT(bad_, 100);
  }

 private:
  int good_ = 0, bad_ = 0;
};

class Random {
 public:
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  bool one_in(int count) { return between(1, count) == 1; }
  // Mostly from 0 to `limit`; now and then beside it, or far off.
  std::int32_t index(std::int64_t limit) {
    if (!one_in(20)) return static_cast<std::int32_t>(between(0, std::max<std::int64_t>(limit, 0)));
    const std::int64_t wild[] = {-1, limit + 1, limit + 2, INT32_MAX, INT32_MIN};
    return static_cast<std::int32_t>(wild[between(0, 4)]);
  }
  Values indices(std::int64_t count, std::int64_t limit) {
    Values out;
    for (std::int64_t n = 0; n < count; ++n) out.push_back(index(limit));
    return out;
  }
  Values offsets(std::int64_t count, std::int64_t longest) {
    Values out = {0};
    for (std::int64_t n = 0; n < count; ++n) out.push_back(out.back() + static_cast<std::int32_t>(between(0, longest)));
    return out;
  }
  void spoil(Values& values) {
    if (one_in(2)) values[static_cast<std::size_t>(between(0, std::ssize(values) - 1))] = index(3);
  }
  Values permuted(std::int64_t count) {
    Values out;
    for (std::int64_t n = 0; n < count; ++n) out.push_back(static_cast<std::int32_t>(n));
    std::shuffle(out.begin(), out.end(), engine_);
    return out;
  }

 private:
  std::mt19937 engine_{7};
};

constexpr int kRounds = 3000;
// More than any of the tensors below has.
std::vector<float> memory(1 << 16);
// Memory that two tensors of a call do not share.
TensorView floats(int part, std::vector<std::int64_t> shape) {
  TensorView view = of({}, std::move(shape));
  view.data = memory.data() + part * (1 << 13);
  view.dtype = DType::f32;
  return view;
}

TEST(IndexChecks, PackedAttention) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t B = random.between(0, 5);
    Values q_at = random.offsets(B, 4), k_at = random.offsets(B, 5);
    const std::int64_t rows = q_at.back(), keys = k_at.back();
    random.spoil(q_at);
    random.spoil(k_at);
    const Values used_q = random.indices(B, 2), used_k = random.indices(B, 3);
    AttentionOptions options;
    options.cu_seqlens_q = of(q_at);
    options.cu_seqlens_k = of(k_at);
    options.max_seqlen_q = random.between(3, 5);
    options.max_seqlen_k = random.between(4, 6);
    if (random.one_in(2)) options.seqused_q = of(used_q);
    if (random.one_in(2)) options.seqused_k = of(used_k);
    const Values q_offset = random.indices(B, 30), key_offset = random.indices(B, 30);
    if (random.one_in(3)) options.q_offset = of(q_offset);
    if (random.one_in(3)) options.key_offset = of(key_offset);
    if (random.one_in(4)) options.q_step = random.one_in(3) ? 1 << 30 : random.between(2, 5);
    if (random.one_in(4)) options.key_step = random.one_in(3) ? 1 << 30 : random.between(2, 5);
    const bool stepped = options.q_step > 1 || options.key_step > 1;
    if (random.one_in(2) && !stepped && (options.q_offset.given() || options.key_offset.given())) {
      options.bias = floats(3, {1, 1, 1, random.between(2, 40)});
    }
    const TensorView q = floats(0, {rows, 2, 4}), k = floats(1, {keys, 1, 4}), v = floats(2, {keys, 1, 4});
    const AttentionProblem p =
        checked_forward_problem(Check("attention_forward"), there(q), there(k), there(v), {}, {}, there(options));
    comparison.expect([&] { attention_forward_workspace(q, k, v, options); }, AttentionIndices{p, {}});
    comparison.expect([&] { attention_backward_workspace(q, k, v, {}, options); }, AttentionIndices{p, {}});
  }
}

// A cache in rows or pages, and where they are.
struct RandomCache {
  std::int64_t B, rows, length;  // rows of `length` slots, or pages
  std::int64_t columns = 0;      // of the page table
  Values table, row_idx;

  RandomCache(Random& random, std::int64_t least_length)
      : B(random.between(1, 6)), rows(B), length(random.between(least_length, least_length + 4)) {
    if (random.one_in(2)) {
      columns = random.between(least_length, 4 + least_length);
      rows = B * columns + random.between(0, 2);
      table = random.permuted(rows);
      table.resize(static_cast<std::size_t>(B * columns));
      for (std::int32_t& page : table) {
        if (random.one_in(40)) page = random.index(rows - 1);
      }
    } else if (random.one_in(2)) {
      rows = B + random.between(0, 2);
      row_idx = random.permuted(rows);
      row_idx.resize(static_cast<std::size_t>(B));
      for (std::int32_t& row : row_idx) {
        if (random.one_in(12)) row = random.index(rows - 1);
      }
    }
  }
  std::int64_t capacity() const { return columns > 0 ? columns * length : length; }
  TensorView page_table() const { return columns > 0 ? of(table, {B, columns}) : TensorView(); }
  TensorView rows_view() const { return row_idx.empty() ? TensorView() : of(row_idx); }
  TensorView keys(int part) const { return floats(part, {rows, length, 1, 4}); }
};

TEST(IndexChecks, CachedAttention) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds; ++round) {
    const RandomCache cache(random, 1);
    const Values used_q = random.indices(cache.B, 3), used_k = random.indices(cache.B, cache.capacity()),
                 leftpad = random.indices(cache.B, 1);
    AttentionOptions options;
    options.page_table = cache.page_table();
    options.cache_batch_idx = cache.rows_view();
    if (random.one_in(2)) options.seqused_q = of(used_q);
    if (random.one_in(2)) options.seqused_k = of(used_k);
    if (random.one_in(2)) options.cache_leftpad = of(leftpad);
    const TensorView q = floats(0, {cache.B, 3, 2, 4}), k = cache.keys(1), v = cache.keys(2);
    const AttentionProblem p =
        checked_forward_problem(Check("attention_forward"), there(q), there(k), there(v), {}, {}, there(options));
    comparison.expect([&] { attention_forward_workspace(q, k, v, options); }, AttentionIndices{p, {}});
  }
}

TEST(IndexChecks, Appends) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds; ++round) {
    const RandomCache cache(random, 2);
    const std::int64_t S = random.between(0, 3);
    const Values seqlens = random.indices(cache.B, cache.capacity() - S);
    const TensorView k_new = floats(0, {cache.B, S, 1, 4}), v_new = floats(1, {cache.B, S, 1, 4}), k = cache.keys(2),
                     v = cache.keys(3), cos = floats(4, {cache.capacity() - random.between(0, 1), 2}), sin = cos;
    const Rotary rotary = random.one_in(2) ? Rotary{cos, sin, false} : Rotary{};
    const AppendProblem p = checked_append_problem(Check("append_kv_cache"), there(k_new), there(v_new), there(k),
                                                   there(v), there(of(seqlens)),
                                                   {.rotary = there(rotary),
                                                    .page_table = there(cache.page_table()),
                                                    .cache_batch_idx = there(cache.rows_view())});
    comparison.expect(
        [&] {
          append_kv_cache(k_new, v_new, k, v, of(seqlens),
                          {.rotary = rotary, .page_table = cache.page_table(), .cache_batch_idx = cache.rows_view()},
                          Runtime());
        },
        AppendIndices{p, IndexName::seqlens});
  }
}

TEST(IndexChecks, AttentionWithAppends) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds; ++round) {
    const RandomCache cache(random, 2);
    const std::int64_t S = random.between(1, 3), rows = random.between(1, 4);
    const Values seqlens = random.indices(cache.B, cache.capacity() - S);
    AttentionOptions options;
    options.seqused_k = of(seqlens);
    options.page_table = cache.page_table();
    options.cache_batch_idx = cache.rows_view();
    options.causal = random.one_in(2) ? Causal::bottom_right : Causal::none;
    const TensorView q = floats(0, {cache.B, rows, 2, 4}), k_new = floats(1, {cache.B, S, 1, 4}),
                     v_new = floats(2, {cache.B, S, 1, 4}), k = cache.keys(3), v = cache.keys(4),
                     cos = floats(5, {cache.capacity(), 2});
    const Rotary rotary = random.one_in(2) ? Rotary{cos, cos, false} : Rotary{};
    const Check check("attention_with_kv_cache");
    const KeyNames names = {.k = IndexName::k_cache, .v = IndexName::v_cache};
    const AttentionOptions options_there = there(options);
    const AttentionProblem attention =
        checked_forward_problem(check, there(q), there(k), there(v), {}, {}, options_there, {names});
    const AppendProblem append =
        checked_append_problem(check, there(k_new), there(v_new), there(k), there(v), options_there.seqused_k,
                               {.rotary = there(rotary),
                                .page_table = options_there.page_table,
                                .cache_batch_idx = options_there.cache_batch_idx},
                               names.seqused_k);
    RotaryProblem rotated;
    if (rotary.cos.given()) {
      TensorView turned = there(q);
      if (options.causal == Causal::none) turned.shape[1] = 1;
      rotated = checked_rotary_problem(check, turned, turned, there(rotary), options_there.seqused_k,
                                       {.x = "q", .offsets = names.seqused_k});
    }
    comparison.expect(
        [&] { attention_with_kv_cache_workspace(q, k_new, v_new, k, v, rotary, options); },
        CachedIndices{{attention, names}, {append, names.seqused_k}, {rotated, names.seqused_k, CheckStep::q_rotary}});
  }
}

TEST(IndexChecks, Rotations) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t B = random.between(0, 5), S = random.between(0, 3);
    const Values offsets = random.indices(B, 8 - S);
    const TensorView x = floats(0, {B, S, 1, 4}), cos = floats(1, {random.between(7, 8), 2});
    const TensorView given = random.one_in(5) ? TensorView() : of(offsets);
    const Rotary rotary{cos, cos, false};
    const RotaryProblem p =
        checked_rotary_problem(Check("apply_rotary"), there(x), there(x), there(rotary), there(given));
    comparison.expect([&] { apply_rotary(x, x, rotary, {.offsets = given}, Runtime()); },
                      RotaryIndices{p, IndexName::offsets});
  }
}

// A cache in 4 bits of one head, with memory of its own.
struct RandomInt4Cache {
  std::int64_t B, rows, columns = 4;
  Values table, row_idx;
  std::vector<std::uint16_t> k_tail, v_tail;
  std::vector<std::uint8_t> blocks;

  explicit RandomInt4Cache(Random& random) : B(random.between(1, 4)), rows(B) {
    if (random.one_in(2)) {
      rows = B + 1;
      row_idx = random.permuted(rows);
      row_idx.resize(static_cast<std::size_t>(B));
      for (std::int32_t& row : row_idx) {
        if (random.one_in(12)) row = random.index(rows - 1);
      }
    }
    const std::int64_t bytes = int4_cache_block_bytes(64, 64);
    if (random.one_in(2)) {
      table = random.permuted(B * columns);
      for (std::int32_t& page : table) {
        if (random.one_in(30)) page = random.index(B * columns - 1);
      }
    }
    k_tail.resize(static_cast<std::size_t>(rows * 128 * 64));
    v_tail.resize(k_tail.size());
    blocks.resize(static_cast<std::size_t>(rows * columns * bytes));
  }
  std::int64_t capacity() const { return columns * 64 + 127; }
  Int4Cache views() const {
    const std::int64_t bytes = int4_cache_block_bytes(64, 64);
    Int4Cache cache;
    cache.k_tail = TensorView(k_tail.data(), DType::f16, {rows, 128, 1, 64});
    cache.v_tail = TensorView(v_tail.data(), DType::f16, {rows, 128, 1, 64});
    cache.blocks = table.empty() ? TensorView(blocks.data(), DType::u8, {rows, columns, 1, bytes})
                                 : TensorView(blocks.data(), DType::u8, {B * columns, 1, bytes});
    if (!table.empty()) cache.page_table = of(table, {B, columns});
    if (!row_idx.empty()) cache.row_idx = of(row_idx);
    return cache;
  }
};

TEST(IndexChecks, Int4Appends) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds / 4; ++round) {
    const RandomInt4Cache cache(random);
    const std::int64_t S = random.one_in(2) ? random.between(0, 3) : random.between(60, 140);
    const Values seqlens = random.indices(cache.B, cache.capacity() - S);
    const std::vector<std::uint16_t> rows(static_cast<std::size_t>(cache.B * S * 64 + 1));
    const TensorView k_new(rows.data(), DType::f16, {cache.B, S, 1, 64}),
        cos = floats(0, {cache.capacity() - random.between(0, 1), 2});
    const Rotary rotary = random.one_in(2) ? Rotary{cos, cos, false} : Rotary{};
    const Int4AppendProblem p =
        checked_int4_append_problem(Check("append_int4_cache"), there(k_new), there(k_new), there(cache.views()),
                                    there(of(seqlens)), {.rotary = there(rotary)});
    comparison.expect(
        [&] { append_int4_cache(k_new, k_new, cache.views(), of(seqlens), {.rotary = rotary}, Runtime()); },
        Int4AppendIndices{p, IndexName::seqlens});
  }
}

TEST(IndexChecks, AttentionOverInt4Caches) {
  Random random;
  Comparison comparison;
  for (int round = 0; round < kRounds / 4; ++round) {
    const RandomInt4Cache cache(random);
    const Values used = random.indices(cache.B, cache.capacity()), leftpad = random.indices(cache.B, 1);
    const std::vector<std::uint16_t> rows(static_cast<std::size_t>(cache.B * 2 * 64));
    const TensorView q(rows.data(), DType::f16, {cache.B, 1, 2, 64});
    AttentionOptions options;
    options.seqused_k = of(used);
    if (random.one_in(2)) options.cache_leftpad = of(leftpad);
    const AttentionProblem p = checked_int4_problem(there(q), there(cache.views()), there(options));
    comparison.expect([&] { attention_over_int4_cache_workspace(q, cache.views(), options); },
                      AttentionIndices{p, kInt4Names});
  }
}

}  // namespace
}  // namespace heddle

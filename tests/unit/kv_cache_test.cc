// append_kv_cache against a plain loop: the whole cache is compared, bit by bit where nothing may be written.
#include "unit/kv_cache_tensors.h"

namespace heddle::kv_cache_tests {
namespace {

// A cache of `pages` pages; a contiguous one has one page a row.
struct Cache {
  Tensor k, v;
  Cache(DType dtype, std::int64_t pages, std::int64_t page_size, std::int64_t heads, std::int64_t D, std::int64_t Dv,
        std::vector<int> order = {}, std::int64_t pad = 0)
      : k(dtype, {pages, page_size, heads, D}, order, pad), v(dtype, {pages, page_size, heads, Dv}, order, pad) {
    k.randomize(21);
    v.randomize(22);
  }
};

// Runs an append and compares the whole cache: new rows where `slot(b, position)` says, old bits elsewhere.
struct AppendCase {
  DType dtype = DType::f32;
  std::int64_t B = 2, S = 3, Hkv = 2, D = 8, Dv = 6, half = 0;
  bool interleaved = false;
  std::vector<std::int32_t> seqlens, table, batch_idx;
  std::int64_t pages = 2, page_size = 16;
  std::vector<int> order;
  std::int64_t pad = 0;
  int threads = 2;
};

void check_append(const AppendCase& c) {
  Cache cache(c.dtype, c.pages, c.page_size, c.Hkv, c.D, c.Dv, c.order, c.pad);
  Cache expected = cache;
  Tensor k_new(c.dtype, {c.B, c.S, c.Hkv, c.D}, {0, 2, 1, 3}, 1), v_new(c.dtype, {c.B, c.S, c.Hkv, c.Dv}, {}, 2);
  k_new.randomize(31);
  v_new.randomize(32);
  const Tables tables(DType::f32, 400, c.half);
  const std::int64_t max_pages = c.table.empty() ? 0 : static_cast<std::int64_t>(c.table.size()) / c.B;
  const TensorView table = c.table.empty() ? TensorView() : TensorView(c.table.data(), DType::i32, {c.B, max_pages});
  const auto pool = make_thread_pool(c.threads);
  append_kv_cache(k_new.view(), v_new.view(), cache.k.view(), cache.v.view(), indices(c.seqlens),
                  {.rotary = c.half > 0 ? tables.rotary(c.interleaved) : Rotary{},
                   .page_table = table,
                   .cache_batch_idx = c.batch_idx.empty() ? TensorView() : indices(c.batch_idx)},
                  {{}, pool.get(), nullptr});
  EXPECT_TRUE(cache.k.guards_intact());
  EXPECT_TRUE(cache.v.guards_intact());
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t i = 0; i < c.S; ++i) {
      const std::int64_t position = c.seqlens[b] + i;
      const std::int64_t page = !c.table.empty()       ? c.table[b * max_pages + position / c.page_size]
                                : !c.batch_idx.empty() ? c.batch_idx[b]
                                                       : b;
      const std::int64_t slot = position % c.page_size;
      for (std::int64_t h = 0; h < c.Hkv; ++h) {
        const auto row = [&](std::int64_t d) { return k_new.get({b, i, h, d}); };
        for (std::int64_t d = 0; d < c.D; ++d) {
          expect_near(cache.k, {page, slot, h, d}, rotated(row, tables, c.half, c.interleaved, position, d));
          expected.k.set({page, slot, h, d}, static_cast<float>(cache.k.get({page, slot, h, d})));
        }
        for (std::int64_t d = 0; d < c.Dv; ++d) {
          expected.v.set({page, slot, h, d}, static_cast<float>(v_new.get({b, i, h, d})));
        }
      }
    }
  }
  EXPECT_EQ(cache.k.bytes(), expected.k.bytes());
  EXPECT_EQ(cache.v.bytes(), expected.v.bytes());
}

TEST(AppendKvCache, ContiguousPagedAndByBatchIndex) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t half : {0, 3, 4}) {
      for (const bool interleaved : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " half " + std::to_string(half));
        AppendCase c;
        c.dtype = dtype;
        c.half = half;
        c.interleaved = interleaved;
        c.seqlens = {0, 13};
        check_append(c);  // the last row of sequence 1 fills the cache
        c.pages = 5;
        c.batch_idx = {3, 1};
        c.order = {2, 0, 1, 3};
        c.pad = 3;
        check_append(c);
        c.batch_idx = {4, 4};  // one cache row for both, at other positions
        c.seqlens = {3, 6};
        check_append(c);
        c.batch_idx = {};
        c.order = {};
        for (const std::int64_t page_size : {1, 2, 5, 16}) {
          c.page_size = page_size;
          c.pages = 20;
          c.table = {7, 2, 19, 0, 11, 4, 3, 8, 5, 6, 9, 10, 1, 12, 13, 14};
          c.seqlens = {4, 1};
          check_append(c);
        }
        c.table = {};
        c.page_size = 16;
      }
    }
  }
}

TEST(AppendKvCache, ManyRowsOnManyThreads) {
  AppendCase c;
  c.B = 3;
  c.S = 100;
  c.D = 64;
  c.Dv = 64;
  c.half = 32;
  c.Hkv = 4;
  c.page_size = 7;
  c.pages = 60;
  c.threads = 4;
  for (int i = 0; i < 60; ++i) c.table.push_back((i * 37) % 60);
  c.seqlens = {0, 33, 40};
  check_append(c);
}

// The cache's rows of a sequence: again, on other threads, and alone.
TEST(AppendKvCache, RepeatsAndASequenceAloneHasTheBitsThatItHasInABatch) {
  for (const DType dtype : kDTypes) {
    const Tables tables(DType::f32, 60, 9);
    Tensor k_new(dtype, {3, 5, 2, 23}), v_new(dtype, {3, 5, 2, 19});
    k_new.randomize(31);
    v_new.randomize(32);
    const std::vector<std::int32_t> lengths = {7, 0, 20};
    const auto append = [&](const Tensor& k, const Tensor& v, Cache& cache, const std::vector<std::int32_t>& seqlens,
                            int threads) {
      const auto pool = make_thread_pool(threads);
      append_kv_cache(k.view(), v.view(), cache.k.view(), cache.v.view(), indices(seqlens),
                      {.rotary = tables.rotary(false)}, {{}, pool.get(), nullptr});
    };
    Cache batch(dtype, 3, 32, 2, 23, 19), again = batch;
    append(k_new, v_new, batch, lengths, 1);
    append(k_new, v_new, again, lengths, 3);
    EXPECT_EQ(batch.k.bytes(), again.k.bytes()) << name_of(dtype);
    EXPECT_EQ(batch.v.bytes(), again.v.bytes()) << name_of(dtype);
    for (std::int64_t b = 0; b < 3; ++b) {
      const auto of_sequence = [b](const Tensor& from, std::int64_t rows, std::int64_t width) {
        Tensor out(from.dtype(), {1, rows, 2, width});
        out.for_each([&](const auto& n) { out.set(n, static_cast<float>(from.get({b, n[1], n[2], n[3]}))); });
        return out;
      };
      Cache alone(dtype, 1, 32, 2, 23, 19);
      append(of_sequence(k_new, 5, 23), of_sequence(v_new, 5, 19), alone, {lengths[static_cast<std::size_t>(b)]}, 1);
      for (std::int64_t row = lengths[static_cast<std::size_t>(b)], end = row + 5; row < end; ++row) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t d = 0; d < 23; ++d) ASSERT_EQ(alone.k.get({0, row, h, d}), batch.k.get({b, row, h, d}));
          for (std::int64_t d = 0; d < 19; ++d) ASSERT_EQ(alone.v.get({0, row, h, d}), batch.v.get({b, row, h, d}));
        }
      }
    }
  }
}

TEST(AppendKvCache, IntoEightBits) {
  for (const std::int64_t half : {0, 3}) {
    Tensor k_new(DType::bf16, {2, 3, 2, 8}), v_new(DType::bf16, {2, 3, 2, 6});
    Cache cache(DType::f8e4m3, 2, 16, 2, 8, 6), expected = cache;
    k_new.randomize(31);
    v_new.randomize(32);
    k_new.set({0, 0, 1, 7}, 3e5f);  // saturates
    const Tables tables(DType::f32, 40, half);
    const std::vector<std::int32_t> seqlens = {0, 13};
    const std::vector<float> scales = {0.25f, 1.7f};
    append_kv_cache(k_new.view(), v_new.view(), cache.k.view(), cache.v.view(), indices(seqlens),
                    {.rotary = half > 0 ? tables.rotary(false) : Rotary{},
                     .k_scale = TensorView(scales.data(), DType::f32, {1, 1, 2}),
                     .v_scale = TensorView(scales.data(), DType::f32, {1, 1, 1})});
    k_new.for_each([&](const auto& at) {
      const auto row = [&](std::int64_t d) { return k_new.get({at[0], at[1], at[2], d}); };
      const std::int64_t position = seqlens[at[0]] + at[1];
      const double x = rotated(row, tables, half, false, position, at[3]).value / scales[at[2]];
      const double stored = cache.k.get({at[0], position, at[2], at[3]});
      // Half a unit of 4 significant bits, or of 2^-9.
      EXPECT_TRUE(std::abs(stored - std::clamp(x, -448.0, 448.0)) <=
                  std::max(std::abs(x) * 0x1.00001p-4, 0x1.00001p-10));
      expected.k.set({at[0], position, at[2], at[3]}, static_cast<float>(stored));
    });
    v_new.for_each([&](const auto& at) {
      expected.v.set({at[0], seqlens[at[0]] + at[1], at[2], at[3]}, static_cast<float>(v_new.get(at)) / scales[0]);
    });
    EXPECT_EQ(cache.k.get({0, 0, 1, 7}), 448);
    EXPECT_EQ(cache.k.bytes(), expected.k.bytes());
    EXPECT_EQ(cache.v.bytes(), expected.v.bytes());
  }
}

// Scales of one for each slot and head are found: the row's largest magnitude / 448. Other slots keep theirs.
TEST(AppendKvCache, FindsTheScaleOfEachRow) {
  for (const std::int64_t half : {0, 3}) {
    Tensor k_new(DType::bf16, {2, 3, 2, 8}), v_new(DType::bf16, {2, 3, 2, 6});
    Cache cache(DType::f8e4m3, 20, 4, 2, 8, 6), expected = cache;
    Tensor k_scale(DType::f32, {20, 4, 2}, {0, 2, 1}, 3), v_scale(DType::f32, {20, 4, 2});
    k_scale.randomize(5), v_scale.randomize(6);
    Tensor k_expected = k_scale, v_expected = v_scale;
    k_new.randomize(31);
    v_new.randomize(32);
    for (std::int64_t d = 0; d < 6; ++d) v_new.set({0, 1, 0, d}, 0.0f);
    v_new.set({1, 0, 0, 2}, std::numeric_limits<float>::infinity());
    v_new.set({1, 0, 1, 2}, std::numeric_limits<float>::quiet_NaN());
    const Tables tables(DType::f32, 40, half);
    const std::vector<std::int32_t> seqlens = {2, 13}, table = {7, 2, 19, 0, 11, 4, 3, 8};
    append_kv_cache(k_new.view(), v_new.view(), cache.k.view(), cache.v.view(), indices(seqlens),
                    {.rotary = half > 0 ? tables.rotary(false) : Rotary{},
                     .page_table = TensorView(table.data(), DType::i32, {2, 4}),
                     .k_scale = k_scale.view(),
                     .v_scale = v_scale.view()});
    const auto check = [&](const Tensor& rows, const Tensor& stored, Tensor& bits, const Tensor& scales, Tensor& kept,
                           bool turned) {
      rows.for_each([&](const auto& at) {
        const auto row = [&](std::int64_t d) { return rows.get({at[0], at[1], at[2], d}); };
        const std::int64_t position = seqlens[at[0]] + at[1], page = table[at[0] * 4 + position / 4];
        const auto value = [&](std::int64_t d) {
          return turned ? rotated(row, tables, half, false, position, d).value : row(d);
        };
        double largest = 0;
        for (std::int64_t d = 0; d < rows.view().shape[3]; ++d) largest = std::fmax(largest, std::abs(value(d)));
        const double scale = std::clamp(largest, 448 * 0x1p-126, 0x1.fffffep127) / 448;
        const double found = scales.get({page, position % 4, at[2]});
        EXPECT_TRUE(std::abs(found - scale) <= 0x1p-22 * scale) << found << " and not " << scale;
        kept.set({page, position % 4, at[2]}, static_cast<float>(found));
        const double x = value(at[3]) / scale, code = stored.get({page, position % 4, at[2], at[3]});
        EXPECT_TRUE(std::isnan(x) ? std::isnan(code)
                                  : std::abs(code - std::clamp(x, -448.0, 448.0)) <=
                                        std::max(std::min(std::abs(x), 448.0) * 0x1.0001p-4, 0x1.0001p-10))
            << code << " for " << x;
        bits.set({page, position % 4, at[2], at[3]}, static_cast<float>(code));
      });
    };
    check(k_new, cache.k, expected.k, k_scale, k_expected, true);
    check(v_new, cache.v, expected.v, v_scale, v_expected, false);
    EXPECT_EQ(cache.k.bytes(), expected.k.bytes());
    EXPECT_EQ(cache.v.bytes(), expected.v.bytes());
    EXPECT_EQ(k_scale.bytes(), k_expected.bytes());
    EXPECT_EQ(v_scale.bytes(), v_expected.bytes());
  }
}

TEST(AppendKvCache, AcceptsNothingToAppend) {
  AppendCase c;
  c.S = 0;
  c.seqlens = {16, 0};
  check_append(c);
  c.B = 0;
  c.pages = 0;
  c.seqlens = {};
  check_append(c);
}

TEST(AppendKvCache, AcceptsOneFusedCacheTensor) {
  // [pages, 2, page_size, heads, D]: keys and values of a page lie beside each other.
  std::vector<float> fused(3 * 2 * 4 * 2 * 8, -1.0f);
  const TensorView k(fused.data(), DType::f32, {3, 4, 2, 8}, {128, 16, 8, 1});
  const TensorView v(fused.data() + 64, DType::f32, {3, 4, 2, 8}, {128, 16, 8, 1});
  Tensor k_new(DType::f32, {1, 2, 2, 8}), v_new(DType::f32, {1, 2, 2, 8});
  k_new.randomize(1);
  v_new.randomize(2);
  const std::vector<std::int32_t> table = {2, 0}, seqlens = {3};
  append_kv_cache(k_new.view(), v_new.view(), k, v, indices(seqlens),
                  {.page_table = TensorView(table.data(), DType::i32, {1, 2})});
  EXPECT_EQ(std::count(fused.begin(), fused.end(), -1.0f), 3 * 128 - 4 * 16);
  EXPECT_EQ(fused[2 * 128 + 3 * 16], static_cast<float>(k_new.get({0, 0, 0, 0})));
  EXPECT_EQ(fused[64 + 15], static_cast<float>(v_new.get({0, 1, 1, 7})));
}

class AppendRefuses : public testing::Test {
 protected:
  Tensor k_new_{DType::f16, {2, 3, 2, 8}}, v_new_{DType::f16, {2, 3, 2, 6}};
  Cache cache_{DType::f16, 4, 5, 2, 8, 6};
  const Cache before_ = cache_;

  std::string contiguous(const std::vector<std::int32_t>& seqlens, const std::vector<std::int32_t>& batch_idx,
                         const Rotary& rotary = {}) {
    return message([&] {
      append_kv_cache(k_new_.view(), v_new_.view(), cache_.k.view(), cache_.v.view(), indices(seqlens),
                      {.rotary = rotary, .cache_batch_idx = batch_idx.empty() ? TensorView() : indices(batch_idx)});
    });
  }
  std::string paged(const std::vector<std::int32_t>& seqlens, const std::vector<std::int32_t>& table) {
    return message([&] {
      append_kv_cache(
          k_new_.view(), v_new_.view(), cache_.k.view(), cache_.v.view(), indices(seqlens),
          {.page_table = TensorView(table.data(), DType::i32, {2, static_cast<std::int64_t>(table.size()) / 2})});
    });
  }
  void TearDown() override {
    EXPECT_EQ(cache_.k.bytes(), before_.k.bytes());
    EXPECT_EQ(cache_.v.bytes(), before_.v.bytes());
  }
};

TEST_F(AppendRefuses, PositionsPastTheCache) {
  EXPECT_EQ(
      contiguous({0, 3}, {0, 1}),
      "[append_kv_cache] seqlens[1] is 3: with 3 rows sequence 1 ends at position 6, and the cache's rows hold 5");
  EXPECT_EQ(contiguous({-1, 0}, {0, 1}), "[append_kv_cache] seqlens[0] is -1: it must be at least 0");
  EXPECT_EQ(contiguous({2147483647, 0}, {0, 1}),
            "[append_kv_cache] seqlens[0] is 2147483647: with 3 rows sequence 0 ends at position 2147483650, and the "
            "cache's rows hold 5");
  EXPECT_EQ(paged({0, 8}, {0, 1, 2, 3}),
            "[append_kv_cache] seqlens[1] is 8: with 3 rows sequence 1 ends at position 11, and page_table's pages "
            "hold 10");
  const Tables tables(DType::f32, 4, 4);
  EXPECT_EQ(contiguous({2, 0}, {0, 1}, tables.rotary(false)),
            "[append_kv_cache] seqlens[0] is 2: with 3 rows sequence 0 ends at position 5, and cos's rows number 4");
}

TEST_F(AppendRefuses, PagesOutOfRange) {
  EXPECT_EQ(paged({0, 4}, {0, -1, 2, -1}),
            "[append_kv_cache] page_table[1, 1] is -1: it must be from 0 to 3 (k_cache has 4 pages)");
  EXPECT_EQ(paged({0, 4}, {0, -1, 2, 4}),
            "[append_kv_cache] page_table[1, 1] is 4: it must be from 0 to 3 (k_cache has 4 pages)");
  EXPECT_EQ(paged({0, 0}, {-2147483647 - 1, 0, 2, 1}),
            "[append_kv_cache] page_table[0, 0] is -2147483648: it must be from 0 to 3 (k_cache has 4 pages)");
  EXPECT_EQ(contiguous({0, 0}, {0, 4}),
            "[append_kv_cache] cache_batch_idx[1] is 4: it must be from 0 to 3 (k_cache has 4 rows)");
  EXPECT_SAYS(contiguous({0, 0}, {}), "k_cache has 4 rows and k_new has 2 sequences");
}

TEST_F(AppendRefuses, TwoRowsForOneSlot) {
  EXPECT_EQ(contiguous({0, 2}, {3, 3}),
            "[append_kv_cache] position 2 of sequence 0 and position 2 of sequence 1 are both slot 2 of cache row 3: "
            "the rows of one call must go to slots of their own");
  EXPECT_EQ(paged({4, 1}, {0, 2, 2, 1}),
            "[append_kv_cache] position 6 of sequence 0 and position 1 of sequence 1 are both slot 1 of page 2: the "
            "rows of one call must go to slots of their own");
}

TEST_F(AppendRefuses, TwoRowsOfOneSequenceForOneSlot) {
  Tensor k_new(DType::f16, {1, 6, 2, 8}), v_new(DType::f16, {1, 6, 2, 6});
  const std::vector<std::int32_t> seqlens = {0}, table = {1, 1};
  EXPECT_EQ(message([&] {
              append_kv_cache(k_new.view(), v_new.view(), cache_.k.view(), cache_.v.view(), indices(seqlens),
                              {.page_table = TensorView(table.data(), DType::i32, {1, 2})});
            }),
            "[append_kv_cache] position 0 of sequence 0 and position 5 of sequence 0 are both slot 0 of page 1: the "
            "rows of one call must go to slots of their own");
}

TEST_F(AppendRefuses, ScalesAndEightBits) {
  const std::vector<std::int32_t> seqlens = {0, 0}, rows = {0, 1};
  const std::vector<float> scales = {1, 1, 1, 1};
  const auto call = [&](const Tensor& k_new, const Tensor& v_new, const Cache& cache, const TensorView& scale) {
    return message([&] {
      append_kv_cache(k_new.view(), v_new.view(), cache.k.view(), cache.v.view(), indices(seqlens),
                      {.cache_batch_idx = indices(rows), .k_scale = scale});
    });
  };
  EXPECT_SAYS(call(k_new_, v_new_, cache_, TensorView(scales.data(), DType::f32, {1, 1, 2})),
              "k_scale is given and the cache is float16: scales are for a float8_e4m3fn cache");
  const Cache narrow(DType::f8e4m3, 4, 5, 2, 8, 6);
  EXPECT_SAYS(call(k_new_, v_new_, narrow, TensorView(scales.data(), DType::f32, {2, 1, 2})),
              "k_scale is [2, 1, 2]: it must be [1, 1, Hkv] = [1, 1, 2] or [1, 1, 1], to be read, or the cache's shape "
              "without its last extent, [4, 5, 2], to be written");
  TensorView expanded(scales.data(), DType::f32, {4, 5, 2});
  expanded.stride = {0, 0, 1};
  EXPECT_SAYS(call(k_new_, v_new_, narrow, expanded), "k_scale");
  const Tensor both(DType::f32, {4, 5, 2});
  EXPECT_SAYS(message([&] {
                append_kv_cache(k_new_.view(), v_new_.view(), narrow.k.view(), narrow.v.view(), indices(seqlens),
                                {.cache_batch_idx = indices(rows), .k_scale = both.view(), .v_scale = both.view()});
              }),
              "v_scale shares memory with k_scale, and scales are written");
  EXPECT_SAYS(call(Tensor(DType::f32, {2, 3, 2, 8}), Tensor(DType::f32, {2, 3, 2, 6}), narrow, {}),
              "k_cache is float8_e4m3fn: it must be float32, float16 or bfloat16");
  EXPECT_SAYS(call(Tensor(DType::f8e4m3, {2, 3, 2, 8}), v_new_, narrow, {}), "k_new is float8_e4m3fn");
}

TEST_F(AppendRefuses, ShapesDtypesAndSharedMemory) {
  const std::vector<std::int32_t> seqlens = {0, 0}, rows = {0, 1};
  const auto call = [&](const TensorView& k_new, const TensorView& v_new, const TensorView& k, const TensorView& v) {
    return message([&] { append_kv_cache(k_new, v_new, k, v, indices(seqlens), {.cache_batch_idx = indices(rows)}); });
  };
  const TensorView k = cache_.k.view(), v = cache_.v.view();
  EXPECT_SAYS(call(k_new_.view(), v_new_.view(), {}, v), "k_cache is missing");
  EXPECT_SAYS(call(k_new_.view(), Tensor(DType::bf16, {2, 3, 2, 6}).view(), k, v),
              "v_new is bfloat16 and k_new is float16: they must be equal");
  EXPECT_SAYS(call(k_new_.view(), Tensor(DType::f16, {2, 4, 2, 6}).view(), k, v), "dimension 1 must be equal");
  EXPECT_SAYS(call(Tensor(DType::f16, {2, 3, 1, 8}).view(), v_new_.view(), k, v), "heads and head size must be equal");
  EXPECT_SAYS(call(k_new_.view(), v_new_.view(), k, Tensor(DType::f16, {4, 6, 2, 6}).view()),
              "v_cache is [4, 6, 2, 6] and k_cache is [4, 5, 2, 8]: dimension 1 must be equal");
  TensorView inside = k;
  inside.shape = {2, 3, 2, 8};
  EXPECT_SAYS(call(inside, v_new_.view(), k, v), "k_cache shares memory with k_new");
  TensorView on_keys = v;
  on_keys.data = k.data;
  EXPECT_SAYS(call(k_new_.view(), v_new_.view(), k, on_keys), "v_cache shares memory with k_cache");
  const TensorView in_cache(k.data, DType::i32, {2});
  std::memset(k.data, 0, 8);  // index data that would pass, were it not about to be overwritten
  std::memset(const_cast<std::byte*>(before_.k.bytes().data()) + 128, 0, 8);
  EXPECT_SAYS(message([&] {
                append_kv_cache(k_new_.view(), v_new_.view(), k, v, in_cache, {.cache_batch_idx = indices(rows)});
              }),
              "k_cache shares memory with seqlens");
}

}  // namespace
}  // namespace heddle::kv_cache_tests

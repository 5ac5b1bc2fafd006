// apply_rotary and append_kv_cache on the GPU against the same operations on the CPU.
#include <gtest/gtest.h>

#include "core/check.h"
#include "gpu/kv_cache_mirror.h"

namespace heddle::kv_cache_tests {
namespace {

struct Shape {
  std::vector<int> order;
  std::int64_t pad;
};

struct RotaryCase {
  DType dtype, table;
  std::int64_t size, half;
  bool interleaved;
  Shape shape;
};

void check_rotary(const RotaryCase& c, const std::vector<std::int32_t>& offsets) {
  SCOPED_TRACE(text(name_of(c.dtype), ", tables ", name_of(c.table), ", size ", c.size, ", half ", c.half,
                    c.interleaved ? ", interleaved" : "", ", pad ", c.shape.pad));
  const std::int64_t count = static_cast<std::int64_t>(offsets.size());
  Tensor x(c.dtype, {count, 5, 3, c.size}, c.shape.order, c.shape.pad), out = x;
  x.randomize(7);
  const Tables tables(c.table, 40, c.half);
  const Mirror x_there(x), out_there(out), cos(tables.cos), sin(tables.sin), offsets_there(indices(offsets));
  const Rotary there{cos.view(), sin.view(), c.interleaved};
  apply_rotary(x.view(), out.view(), tables.rotary(c.interleaved), {.offsets = indices(offsets)});
  on_stream([&](const Runtime& runtime) {
    apply_rotary(x_there.view(), out_there.view(), there, {.offsets = offsets_there.view()}, runtime);
  });
  expect_equal(out_there.bytes(), out.bytes(), c.dtype, 1, "out");
  // In place.
  apply_rotary(x.view(), x.view(), tables.rotary(c.interleaved), {}, {});
  on_stream([&](const Runtime& runtime) { apply_rotary(x_there.view(), x_there.view(), there, {}, runtime); });
  expect_equal(x_there.bytes(), x.bytes(), c.dtype, 1, "x in place");
}

TEST(GpuRotary, AsOnTheCpu) {
  for (const DType dtype : kDTypes) {
    for (const bool interleaved : {false, true}) {
      for (const DType table : {DType::f32, dtype}) {
        check_rotary({dtype, table, 128, 64, interleaved, {}}, {0, 17});
        check_rotary({dtype, table, 64, 16, interleaved, {{2, 0, 1, 3}, 0}}, {35, 3, 0});
        check_rotary({dtype, table, 256, 128, interleaved, {}}, {1});
        check_rotary({dtype, table, 33, 5, interleaved, {}}, {4, 9});
        check_rotary({dtype, table, 64, 32, interleaved, {{0, 1, 2, 3}, 3}}, {4, 9});
        check_rotary({dtype, table, 16, 8, interleaved, {{3, 0, 1, 2}, 1}}, {2});
      }
    }
  }
}

TEST(GpuRotary, PositionsAreClamped) {
  Tensor x(DType::bf16, {2, 5, 3, 32});
  x.randomize(3);
  Tensor expected = x;
  const Tables tables(DType::f32, 8, 16);
  const std::vector<std::int32_t> offsets = {6, -3};
  const Mirror there(x), cos(tables.cos), sin(tables.sin), offsets_there(indices(offsets));
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < 5; ++i) {
      TensorView row = expected.view();
      row.data = static_cast<std::byte*>(row.data) + 2 * expected.at({b, i, 0, 0});
      row.shape[0] = row.shape[1] = 1;
      const std::vector<std::int32_t> position = {
          static_cast<std::int32_t>(std::clamp<std::int64_t>(offsets[b] + i, 0, 7))};
      apply_rotary(row, row, tables.rotary(false), {.offsets = indices(position)});
    }
  }
  on_stream([&](const Runtime& runtime) {
    apply_rotary(there.view(), there.view(), {cos.view(), sin.view(), false}, {.offsets = offsets_there.view()},
                 runtime);
  });
  expect_equal(there.bytes(), expected.bytes(), DType::bf16, 1, "x");
}

struct AppendCase {
  DType dtype = DType::bf16;
  std::int64_t B = 2, S = 3, Hkv = 2, D = 64, Dv = 48, half = 0;
  bool interleaved = false;
  std::vector<std::int32_t> seqlens = {}, table = {}, batch_idx = {};
  std::int64_t pages = 2, page_size = 16;
  Shape shape = {};
  bool narrow = false;  // a cache of f8e4m3, with scales
  bool finds = false;   // which the append finds, for each slot and head
};

// The tensors of a case; `run` appends sequences as they are, on the CPU or with all that is mirrored on the GPU.
struct Append {
  const AppendCase c;
  const DType stored;
  Tensor k_new, v_new, k_cache, v_cache;
  Tables tables;
  TensorView table, batch_idx, k_scale, v_scale;
  const std::vector<float> scales = {0.37f, 1.0f, 0.002f, 5.5f};
  Tensor k_found, v_found;

  explicit Append(const AppendCase& spec)
      : c(spec),
        stored(c.narrow ? DType::f8e4m3 : c.dtype),
        k_new(c.dtype, {c.B, c.S, c.Hkv, c.D}, c.shape.order, c.shape.pad),
        v_new(c.dtype, {c.B, c.S, c.Hkv, c.Dv}, c.shape.order, c.shape.pad),
        k_cache(stored, {c.pages, c.page_size, c.Hkv, c.D}, c.shape.order, c.shape.pad),
        v_cache(stored, {c.pages, c.page_size, c.Hkv, c.Dv}, c.shape.order, c.shape.pad),
        tables(DType::f32, 400, c.half),
        k_found(DType::f32, {c.pages, c.page_size, c.Hkv}, {0, 2, 1}, 1),
        v_found(DType::f32, {c.pages, c.page_size, c.Hkv}) {
    k_new.randomize(31);
    v_new.randomize(32);
    k_cache.randomize(21);
    v_cache.randomize(22);
    if (!c.table.empty()) {
      table = TensorView(c.table.data(), DType::i32, {c.B, static_cast<std::int64_t>(c.table.size()) / c.B});
    }
    if (c.finds) {
      k_scale = k_found.view();
      v_scale = v_found.view();
    } else if (c.narrow) {
      k_scale = TensorView(scales.data(), DType::f32, {1, 1, c.Hkv});
      v_scale = TensorView(scales.data() + 3, DType::f32, {1, 1, 1});
    }
    if (!c.batch_idx.empty()) batch_idx = indices(c.batch_idx);
  }

  void on_cpu(const TensorView& new_k, const TensorView& new_v, const TensorView& seqlens, const TensorView& pages,
              const TensorView& rows) {
    append_kv_cache(new_k, new_v, k_cache.view(), v_cache.view(), seqlens,
                    {.rotary = c.half > 0 ? tables.rotary(c.interleaved) : Rotary{},
                     .page_table = pages,
                     .cache_batch_idx = rows,
                     .k_scale = k_scale,
                     .v_scale = v_scale});
  }
  void on_gpu_equals_cpu(const std::function<void()>& cpu) {
    SCOPED_TRACE(text(name_of(c.dtype), ", half ", c.half, c.interleaved ? ", interleaved" : "", ", pages of ",
                      c.page_size, ", size ", c.D, ", pad ", c.shape.pad));
    const Mirror k_new_there(k_new), v_new_there(v_new), k_there(k_cache), v_there(v_cache), cos(tables.cos),
        sin(tables.sin), seqlens(indices(c.seqlens)), table_there(table), batch_idx_there(batch_idx),
        k_scale_there = c.finds ? Mirror(k_found) : Mirror(k_scale),
        v_scale_there = c.finds ? Mirror(v_found) : Mirror(v_scale);
    on_stream([&](const Runtime& runtime) {
      append_kv_cache(k_new_there.view(), v_new_there.view(), k_there.view(), v_there.view(), seqlens.view(),
                      {.rotary = c.half > 0 ? Rotary{cos.view(), sin.view(), c.interleaved} : Rotary{},
                       .page_table = table_there.view(),
                       .cache_batch_idx = batch_idx_there.view(),
                       .k_scale = k_scale_there.view(),
                       .v_scale = v_scale_there.view()},
                      runtime);
    });
    const std::vector<std::byte> before = k_cache.bytes();
    cpu();
    expect_equal(k_there.bytes(), k_cache.bytes(), stored, c.half > 0 ? 1 : 0, "k_cache");
    expect_equal(v_there.bytes(), v_cache.bytes(), stored, 0, "v_cache");
    if (c.finds) {
      expect_equal(k_scale_there.bytes(), k_found.bytes(), DType::f32, c.half > 0 ? 4 : 0, "k_scale");
      expect_equal(v_scale_there.bytes(), v_found.bytes(), DType::f32, 0, "v_scale");
    }
    EXPECT_NE(k_cache.bytes(), before) << "the case appends nothing";
  }
};

void check_append(const AppendCase& c) {
  Append append(c);
  append.on_gpu_equals_cpu([&] {
    append.on_cpu(append.k_new.view(), append.v_new.view(), indices(c.seqlens), append.table, append.batch_idx);
  });
}

TEST(GpuAppend, AsOnTheCpu) {
  for (const DType dtype : kDTypes) {
    for (const auto& [half, interleaved] : {std::pair{0, false}, {16, false}, {32, true}, {5, false}, {3, true}}) {
      AppendCase c;
      c.dtype = dtype;
      c.half = half;
      c.interleaved = interleaved;
      c.seqlens = {0, 13};
      check_append(c);
      c.pages = 5;
      c.batch_idx = {3, 1};
      c.shape = {{2, 0, 1, 3}, 8};
      check_append(c);
      c.batch_idx = {};
      c.pages = 20;
      c.table = {7, 2, 19, 0, 11, 4, 3, 8, 5, 6, 9, 10, 1, 12, 13, 14};
      c.seqlens = {4, 1};
      for (const std::int64_t page_size : {1, 5, 16}) {
        c.page_size = page_size;
        for (const Shape& shape : {Shape{}, Shape{{3, 0, 1, 2}, 3}}) {
          c.shape = shape;
          check_append(c);
        }
      }
    }
  }
}

TEST(GpuAppend, IntoEightBits) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const auto& [half, interleaved] : {std::pair{0, false}, {16, false}, {32, true}, {5, false}}) {
      AppendCase c;
      c.dtype = dtype;
      c.half = half;
      c.interleaved = interleaved;
      c.narrow = true;
      c.seqlens = {4, 1};
      check_append(c);
      c.shape = {{3, 0, 1, 2}, 3};
      check_append(c);
      c.shape = {};
      c.page_size = 5;
      c.pages = 20;
      c.table = {7, 2, 19, 0};
      check_append(c);
      c.finds = true;
      check_append(c);
      c.shape = {{3, 0, 1, 2}, 3};
      check_append(c);
      c.Hkv = 11, c.D = 256, c.Dv = 17;
      check_append(c);
    }
  }
}

TEST(GpuAppend, KeepsEveryBit) {
  Append append({.seqlens = {2, 5}});
  std::uint16_t bits = 0;  // NaN of every payload among them
  append.k_new.for_each([&](const auto& index) {
    bits = static_cast<std::uint16_t>(bits * 40503 + 1);
    std::memcpy(static_cast<std::byte*>(append.k_new.view().data) + 2 * append.k_new.at(index), &bits, 2);
  });
  append.on_gpu_equals_cpu(
      [&] { append.on_cpu(append.k_new.view(), append.v_new.view(), indices(append.c.seqlens), {}, {}); });
}

// Rows first .. first + count - 1 of sequence b alone.
TensorView rows_of(const Tensor& x, std::int64_t b, std::int64_t first, std::int64_t count) {
  TensorView view = x.view();
  view.data =
      static_cast<std::byte*>(view.data) + x.at({b, first, 0, 0}) * static_cast<std::int64_t>(size_of(x.dtype()));
  view.shape[0] = 1;
  view.shape[1] = count;
  return view;
}

TEST(GpuAppend, RowsOutsideTheCacheAreDropped) {
  // Sequences that end past the cache, begin before it, lie far away, or fit.
  AppendCase c{.B = 5, .half = 16, .seqlens = {14, -2, 2147483647, -2147483647 - 1, 6}, .pages = 5};
  Append append(c);
  append.on_gpu_equals_cpu([&] {
    const auto one = [&](std::int32_t b, std::int64_t first, std::int64_t count, std::int32_t at) {
      append.on_cpu(rows_of(append.k_new, b, first, count), rows_of(append.v_new, b, first, count), indices({at}), {},
                    indices({b}));
    };
    one(0, 0, 2, 14);
    one(1, 2, 1, 0);
    one(4, 0, 3, 6);
  });
  c.batch_idx = {-1, 5, 2147483647, -2147483647 - 1, 3};
  c.seqlens = {0, 1, 2, 3, 4};
  Append by_row(c);
  by_row.on_gpu_equals_cpu([&] {
    by_row.on_cpu(rows_of(by_row.k_new, 4, 0, 3), rows_of(by_row.v_new, 4, 0, 3), indices({4}), {}, indices({3}));
  });
}

TEST(GpuAppend, PagesOutsideTheCacheAreDropped) {
  AppendCase c{.B = 2, .S = 6, .seqlens = {2, 9}, .table = {1, -1, 2, 0, 3, 4}, .pages = 4, .page_size = 4};
  Append append(c);
  append.on_gpu_equals_cpu([&] {
    // Sequence 0: positions 2, 3 on page 1, 4 .. 7 nowhere. Sequence 1: 9 .. 11 on page 4, which there is not, and 12
    // .. 14 past the table.
    const std::vector<std::int32_t> table = {1};
    append.on_cpu(rows_of(append.k_new, 0, 0, 2), rows_of(append.v_new, 0, 0, 2), indices({2}),
                  TensorView(table.data(), DType::i32, {1, 1}), {});
  });
}

TEST(GpuAppend, RefusesTensorsOnTwoDevices) {
  const Tensor x(DType::bf16, {1, 1, 1, 8}), cache(DType::bf16, {1, 4, 1, 8});
  const Mirror x_there(x), cache_there(cache), cache_too(cache);
  const std::vector<std::int32_t> zero = {0};
  const Mirror zero_there(indices(zero));
  const Tables tables(DType::f32, 8, 4);
  const auto append = [&](const TensorView& v_new, const TensorView& k_cache, const TensorView& seqlens) {
    return message([&] { append_kv_cache(x_there.view(), v_new, k_cache, cache_too.view(), seqlens); });
  };
  EXPECT_SAYS(append(x.view(), cache_there.view(), zero_there.view()), "v_new is on another device than k_new");
  EXPECT_SAYS(append(x_there.view(), cache.view(), zero_there.view()), "k_cache is on another device than k_new");
  EXPECT_SAYS(append(x_there.view(), cache_there.view(), indices(zero)), "seqlens is on another device than k_new");
  EXPECT_SAYS(message([&] { apply_rotary(x_there.view(), x_there.view(), tables.rotary(false), {}, {}); }),
              "cos is on another device than x");
}

}  // namespace
}  // namespace heddle::kv_cache_tests

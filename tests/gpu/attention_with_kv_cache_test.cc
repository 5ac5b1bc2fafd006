// attention_with_kv_cache on the GPU: every candidate, whether it writes new keys itself or not, against the case
// table's judge; and one call against append_kv_cache, apply_rotary and attention_forward one after the other.
#include <gtest/gtest.h>

#include "gpu/device_call.h"
#include "gpu/kv_cache_mirror.h"
#include "kernels/cache_step.h"

namespace heddle::kit {
namespace {

class GpuCacheStep : public ::testing::TestWithParam<AttentionCase> {};

// The mirrors of a step, and the call on them.
struct DeviceStep {
  const CacheStep& step;
  std::vector<DeviceTensor> held;
  DeviceTensor k_cache, v_cache, o;
  TensorView q, k_new, v_new;
  AttentionOptions options;

  explicit DeviceStep(const CacheStep& s)
      : step(s), k_cache(s.k_cache), v_cache(s.v_cache), o(s.data.new_o()), options(s.data.options()) {
    q = mirror(s.data.q);
    k_new = mirror(s.k_new);
    v_new = mirror(s.v_new);
    options.seqused_k = mirror(s.seqlens);
    options.page_table = mirror(s.data.page_table);
    options.cache_batch_idx = mirror(s.data.cache_batch_idx);
    options.draft_mask = mirror(s.data.draft_mask);
    options.sink = mirror(s.data.sink);
    options.k_scale = mirror(s.data.k_scale);
    options.v_scale = mirror(s.data.v_scale);
  }

  TensorView mirror(const HostTensor& host) {
    held.emplace_back(host);
    return held.back().view();
  }

  void run() const {
    const DeviceStream stream;
    const DeviceMemory memory(
        attention_with_kv_cache_workspace(q, k_new, v_new, k_cache.view(), v_cache.view(), {}, options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    attention_with_kv_cache(q, k_new, v_new, k_cache.view(), v_cache.view(), o.view(), {}, {}, options, runtime);
    stream.synchronize();
  }
};

std::vector<std::string> candidates_of(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
                                       const AttentionOptions& options) {
  std::vector<std::string> names;
  for (const Candidate& candidate : explain_attention(q, k_cache, v_cache, options)) {
    if (candidate.supported) names.push_back(candidate.name);
  }
  return names;
}

TEST_P(GpuCacheStep, EveryCandidateAppendsAndAttends) {
  const CacheStep step(GetParam(), 3);
  const DeviceStep any(step);
  const std::vector<std::string> names = candidates_of(any.q, any.k_cache.view(), any.v_cache.view(), any.options);
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    DeviceStep call(step);
    call.options.force = name;
    call.run();
    HostTensor o = step.data.new_o(), k = step.k_cache, v = step.v_cache;
    call.o.read(o);
    call.k_cache.read(k);
    call.v_cache.read(v);
    EXPECT_EQ(step.verdict(o, k, v), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, GpuCacheStep, ::testing::ValuesIn(cache_step_cases()), case_name);

using kv_cache_tests::expect_equal;
using kv_cache_tests::indices;
using kv_cache_tests::Mirror;
using kv_cache_tests::on_stream;
using kv_cache_tests::Tables;
using kv_cache_tests::Tensor;

struct CacheCall {
  const char* name;
  std::int64_t B = 2, Sq = 1, Sn = 1, H = 8, Hkv = 2, D = 128, Dv = 128, half = 64;
  std::vector<std::int32_t> seqlens = {700, 33};
  bool interleaved = false, by_row = true, narrow = false, finds = false;  // finds: scales, for each slot and head
  Causal causal = Causal::bottom_right;
  std::int64_t window_left = -1;
  std::int64_t page_size = 0;  // 0: contiguous rows of 1024 slots
  bool rows_elsewhere = false, left_padded = false, invariant = false;
  DType dtype = DType::bf16;
  bool same_parts = true;
};
void PrintTo(const CacheCall& c, std::ostream* out) { *out << c.name; }

// The elements of two copies of a tensor's memory.
void expect_close(const std::vector<std::byte>& out, const std::vector<std::byte>& expected, const Tensor& layout,
                  double tolerance, const char* name) {
  const TensorView view = layout.view();
  const auto first = static_cast<const std::byte*>(view.data) - layout.bytes().data();
  layout.for_each([&](const auto& index) {
    const double x = load_element(&out[first], view.dtype, layout.at(index));
    const double y = load_element(&expected[first], view.dtype, layout.at(index));
    ASSERT_TRUE(x == y || std::abs(x - y) <= tolerance) << name << " is " << x << " and not " << y;
  });
}

class GpuCacheCall : public ::testing::TestWithParam<CacheCall> {
 protected:
  static constexpr std::int64_t kSlots = 1024;
  const CacheCall c = GetParam();
  const std::int64_t page = c.page_size > 0 ? c.page_size : kSlots;
  const std::int64_t table_pages = kSlots / page;
  const std::int64_t pages = c.page_size > 0 ? c.B* table_pages + 3 : c.B + 2;
  const DType stored = c.narrow ? DType::f8e4m3 : c.dtype;
  Tensor q{c.dtype, {c.B, c.Sq, c.H, c.D}}, k_new{c.dtype, {c.B, c.Sn, c.Hkv, c.D}},
      v_new{c.dtype, {c.B, c.Sn, c.Hkv, c.Dv}}, k_cache{stored, {pages, page, c.Hkv, c.D}},
      v_cache{stored, {pages, page, c.Hkv, c.Dv}}, o{c.dtype, {c.B, c.Sq, c.H, c.Dv}},
      lse{DType::f32, {c.B, c.H, c.Sq}};
  Tables tables{DType::f32, 2000, c.half};
  std::vector<std::int32_t> table, rows, leftpad, after;
  const std::vector<float> scales = {0.6f, 1.0f, 0.03f, 2.5f};
  Tensor k_found{DType::f32, {pages, page, c.Hkv}, {0, 2, 1}}, v_found{DType::f32, {pages, page, c.Hkv}};

  void SetUp() override {
    unsigned seed = 1;
    for (Tensor* x : {&q, &k_new, &v_new, &k_cache, &v_cache}) x->randomize(seed++);
    for (Tensor* x : {&k_found, &v_found}) {
      x->for_each([&](const auto& at) { x->set(at, 0.3f + 0.1f * static_cast<float>((at[0] + at[1] + at[2]) % 7)); });
    }
    for (std::int64_t n = 0; n < c.B * table_pages; ++n) {
      table.push_back(static_cast<std::int32_t>((n * 7919 + 3) % (c.B * table_pages)));
    }
    for (std::int64_t b = 0; b < c.B; ++b) {
      rows.push_back(static_cast<std::int32_t>(c.B + 1 - b));
      leftpad.push_back(static_cast<std::int32_t>(5 + 11 * b));
      after.push_back(static_cast<std::int32_t>(c.seqlens[b] + c.Sn));
    }
  }

  TensorView table_view() const {
    return c.page_size > 0 ? TensorView(table.data(), DType::i32, {c.B, table_pages}) : TensorView();
  }
  // What attends: the cache's first c.B rows, unless rows are chosen.
  TensorView attended(TensorView cache) const {
    if (c.page_size == 0 && !c.rows_elsewhere) cache.shape[0] = c.B;
    return cache;
  }
};

// What one call writes is what the three operations write, bit for bit: new keys always, o and lse if the candidate
// cuts keys into the same parts both times. Else they agree as far as rounding lets them. sm90_decode agrees that far
// only: it does not round q between rotation and scale, and its fused multiply-adds may round a new key the other way.
TEST_P(GpuCacheCall, IsThreeOperations) {
  const Mirror q_there(q), k_new_there(k_new), v_new_there(v_new), cos(tables.cos), sin(tables.sin);
  const Mirror seqlens(indices(c.seqlens)), seqlens_after(indices(after)), pages_there(table_view()),
      rows_there(c.rows_elsewhere ? indices(rows) : TensorView()),
      leftpad_there(c.left_padded ? indices(leftpad) : TensorView()),
      scales_there(TensorView(scales.data(), DType::f32, {1, 1, c.Hkv}));
  const TensorView scale = c.narrow ? scales_there.view() : TensorView();
  const Mirror k_found_any(k_found), v_found_any(v_found);
  const Rotary rotary = c.half > 0 ? Rotary{cos.view(), sin.view(), c.interleaved} : Rotary{};
  AttentionOptions options;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.page_table = pages_there.view();
  options.cache_batch_idx = rows_there.view();
  options.cache_leftpad = leftpad_there.view();
  options.k_scale = c.finds ? attended(k_found_any.view()) : scale;
  options.v_scale = c.finds ? attended(v_found_any.view()) : scale;
  options.batch_invariant = c.invariant;
  options.seqused_k = seqlens.view();
  const Mirror k_any(k_cache), v_any(v_cache);
  const std::vector<std::string> names =
      candidates_of(q_there.view(), attended(k_any.view()), attended(v_any.view()), options);
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    options.force = name;
    const Mirror k_one(k_cache), v_one(v_cache), o_one(o), lse_one(lse);
    const Mirror k_three(k_cache), v_three(v_cache), o_three(o), lse_three(lse), turned(q);
    const Mirror k_found_one(k_found), v_found_one(v_found), k_found_three(k_found), v_found_three(v_found);
    const auto scales_are = [&](const Mirror& k_scales, const Mirror& v_scales) {
      if (!c.finds) return;
      options.k_scale = attended(k_scales.view());
      options.v_scale = attended(v_scales.view());
    };
    scales_are(k_found_one, v_found_one);

    options.seqused_k = seqlens.view();
    const DeviceMemory memory(
        attention_with_kv_cache_workspace(q_there.view(), k_new_there.view(), v_new_there.view(),
                                          attended(k_one.view()), attended(v_one.view()), rotary, options),
        0xFF);
    on_stream([&](Runtime runtime) {
      runtime.workspace = {memory.data(), memory.bytes()};
      attention_with_kv_cache(q_there.view(), k_new_there.view(), v_new_there.view(), attended(k_one.view()),
                              attended(v_one.view()), o_one.view(), lse_one.view(), rotary, options, runtime);
    });

    scales_are(k_found_three, v_found_three);
    options.seqused_k = seqlens_after.view();
    const TensorView k_after = attended(k_three.view()), v_after = attended(v_three.view());
    const DeviceMemory after_memory(attention_forward_workspace(turned.view(), k_after, v_after, options), 0xFF);
    on_stream([&](Runtime runtime) {
      append_kv_cache(k_new_there.view(), v_new_there.view(), k_after, v_after, seqlens.view(),
                      {.rotary = rotary,
                       .page_table = pages_there.view(),
                       .cache_batch_idx = rows_there.view(),
                       .k_scale = options.k_scale,
                       .v_scale = options.v_scale},
                      runtime);
      TensorView turned_rows = turned.view();
      if (c.half > 0) {
        if (!c.by_row) {
          turned_rows.shape = {c.B, 1, c.Sq * c.H, c.D};
          turned_rows.stride[1] = turned_rows.stride[0];
        }
        apply_rotary(turned_rows, turned_rows, rotary, {.offsets = seqlens.view()}, runtime);
      }
      runtime.workspace = {after_memory.data(), after_memory.bytes()};
      attention_forward(turned.view(), k_after, v_after, o_three.view(), lse_three.view(), options, runtime);
    });
    EXPECT_NE(k_one.bytes(), k_cache.bytes());
    const bool exact = name != "sm90_decode";
    expect_equal(k_one.bytes(), k_three.bytes(), stored, exact ? 0 : 1, "k_cache");
    expect_equal(v_one.bytes(), v_three.bytes(), stored, 0, "v_cache");
    expect_equal(k_found_one.bytes(), k_found_three.bytes(), DType::f32, exact ? 0 : 8, "k_scale");
    expect_equal(v_found_one.bytes(), v_found_three.bytes(), DType::f32, 0, "v_scale");
    if (c.finds) {
      EXPECT_NE(k_found_one.bytes(), k_found.bytes());
    }
    EXPECT_NE(o_one.bytes(), o.bytes());
    if (c.same_parts && exact) {
      expect_equal(o_one.bytes(), o_three.bytes(), c.dtype, 0, "o");
      expect_equal(lse_one.bytes(), lse_three.bytes(), DType::f32, 0, "lse");
    } else {
      expect_close(o_one.bytes(), o_three.bytes(), o, 0.02, "o");
      expect_close(lse_one.bytes(), lse_three.bytes(), lse, exact ? 1e-4 : 0.01, "lse");
    }
  }
}

std::vector<CacheCall> cache_calls() {
  std::vector<CacheCall> all;
  const auto with = [&](const char* name, auto change) {
    CacheCall c{.name = name};
    change(c);
    all.push_back(c);
  };
  with("plain", [](auto&) {});
  with("f16_interleaved", [](auto& c) { c.dtype = DType::f16, c.interleaved = true, c.half = 20; });
  with("no_rotary", [](auto& c) { c.half = 0, c.D = 64, c.Dv = 64; });
  with("several_rows", [](auto& c) { c.Sq = c.Sn = 5; });
  with("two_tiles", [](auto& c) { c.Sq = c.Sn = 7, c.seqlens = {1000, 0}; });
  with("rows_at_one_position", [](auto& c) { c.Sq = 3, c.by_row = false, c.causal = Causal::none; });
  with("paged_16", [](auto& c) { c.page_size = 16, c.Sn = c.Sq = 4; });
  with("paged_1", [](auto& c) { c.page_size = 1, c.D = 96, c.Dv = 40, c.half = 24; });
  with("chosen_rows_left_padded", [](auto& c) { c.rows_elsewhere = c.left_padded = true; });
  with("more_padding_than_keys", [](auto& c) {
    c.left_padded = true, c.seqlens = {2, 9}, c.Sn = 8, c.same_parts = false;
  });
  with("new_keys_that_nobody_attends",
       [](auto& c) { c.causal = Causal::top_left, c.Sq = 2, c.Sn = 20, c.same_parts = false; });
  with("window", [](auto& c) { c.window_left = 10, c.Sq = 2, c.Sn = 40, c.same_parts = false; });
  with("size_256", [](auto& c) { c.D = c.Dv = 256, c.half = 128, c.Sn = c.Sq = 2; });
  with("past_the_end", [](auto& c) { c.seqlens = {1023, 1024}, c.Sn = 3; });
  with("eight_bits", [](auto& c) { c.narrow = true, c.Sq = c.Sn = 3; });
  with("eight_bits_f16_paged_256",
       [](auto& c) { c.narrow = true, c.dtype = DType::f16, c.page_size = 8, c.D = c.Dv = 256, c.half = 64; });
  with("found_scales", [](auto& c) { c.narrow = c.finds = true; });
  with("found_scales_rows", [](auto& c) { c.narrow = c.finds = true, c.Sq = c.Sn = 5, c.dtype = DType::f16; });
  with("found_scales_paged", [](auto& c) { c.narrow = c.finds = true, c.page_size = 16, c.Sq = c.Sn = 9; });
  with("found_scales_paged_256",
       [](auto& c) { c.narrow = c.finds = true, c.page_size = 8, c.D = c.Dv = 256, c.half = 64, c.Sn = c.Sq = 2; });
  with("found_scales_chosen_rows", [](auto& c) { c.narrow = c.finds = c.rows_elsewhere = c.left_padded = true; });
  with("batch_invariant", [](auto& c) { c.invariant = true; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Calls, GpuCacheCall, ::testing::ValuesIn(cache_calls()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit

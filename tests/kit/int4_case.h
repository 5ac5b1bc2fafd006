// A cache in 4 bits with its sequences, for the tests of CPU and GPU. Keys have outlier channels, as those of models
// do.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kit/compare.h"
#include "kit/host_tensor.h"
#include "kit/indices.h"
#include "kit/yardstick.h"
#include "ops/kv_cache/int4_cache.h"
#include "problem/int4_cache.h"
#include "reference/attention.h"

namespace heddle::kit {

struct Int4Spec {
  std::string name;
  DType dtype = DType::bf16;
  std::int64_t H = 8, Hkv = 2, Sq = 1, D = 128, Dv = 128;
  std::vector<std::int32_t> lengths = {700, 33, 191};
  std::int64_t max_blocks = 12;
  bool paged = false, row_idx = false, leftpad = false, invariant = false, mask = false, sink = false;
  Causal causal = Causal::bottom_right;
  std::int64_t window_left = -1;
  float softcap = 0;
  float scale_of_values = 1;

  std::int64_t B() const { return static_cast<std::int64_t>(lengths.size()); }
};

class Int4Case {
 public:
  explicit Int4Case(const Int4Spec& s) : spec(s) {
    const std::int64_t longest = s.max_blocks * kInt4Keys + kInt4Tail - 1, rows = s.row_idx ? s.B() + 2 : s.B();
    const std::int64_t bytes = int4_cache_block_bytes(s.D, s.Dv), pages = s.B() * s.max_blocks + 3;
    q = HostTensor::input(s.dtype, {s.B(), s.Sq, s.H, s.D});
    k_new = HostTensor::input(s.dtype, {s.B(), longest, s.Hkv, s.D});
    v_new = HostTensor::input(s.dtype, {s.B(), longest, s.Hkv, s.Dv});
    k_tail = HostTensor::output(s.dtype, {rows, kInt4Tail, s.Hkv, s.D});
    v_tail = HostTensor::output(s.dtype, {rows, kInt4Tail, s.Hkv, s.Dv});
    blocks = s.paged ? HostTensor::input(DType::u8, {pages, s.Hkv, bytes})
                     : HostTensor::input(DType::u8, {rows, s.max_blocks, s.Hkv, bytes});
    lengths = indices(std::vector<std::int64_t>(s.lengths.begin(), s.lengths.end()));
    std::vector<std::int64_t> table, row, pad;
    for (std::int64_t n = 0; n < s.B() * s.max_blocks; ++n) table.push_back((n * 7 + 2) % (pages - 3));
    for (std::int64_t b = 0; b < s.B(); ++b) row.push_back(s.B() + 1 - b), pad.push_back(5 + 31 * b);
    if (s.paged) {
      page_table = HostTensor::input(DType::i32, {s.B(), s.max_blocks});
      // Seven and the number of pages may share a factor: then as they come.
      std::vector<bool> seen(table.size());
      bool distinct = true;
      for (const std::int64_t page : table) distinct &= !seen[page], seen[page] = true;
      for (std::size_t n = 0; n < table.size(); ++n) {
        page_table.set(static_cast<std::int64_t>(n),
                       static_cast<double>(distinct ? table[n] : static_cast<std::int64_t>(n)));
      }
    }
    if (s.row_idx) row_idx = indices(row);
    if (s.leftpad) leftpad = indices(pad);
    std::mt19937 random(11);
    std::normal_distribution<double> normal;
    fill(q, [&](std::int64_t) { return normal(random); });
    fill(k_new, [&](std::int64_t d) { return normal(random) + (d % 32 == 5 ? 9.0 : d % 32 == 20 ? -5.0 : 0.0); });
    fill(v_new, [&](std::int64_t) { return normal(random) * s.scale_of_values; });
    if (s.sink) {
      sink = HostTensor::input(DType::f32, {s.H});
      fill(sink, [&](std::int64_t) { return normal(random); });
    }
    if (s.mask) {
      mask = HostTensor::input(DType::boolean, {s.B(), 1, 1, longest});
      fill(mask, [&](std::int64_t) { return normal(random) > -0.5 ? 1.0 : 0.0; });
    }
  }

  const Int4Spec spec;
  HostTensor q, k_new, v_new, k_tail, v_tail, blocks, page_table, row_idx, lengths, leftpad, sink, mask;

  Int4Cache cache() const { return {blocks.view(), k_tail.view(), v_tail.view(), page_table.view(), row_idx.view()}; }
  AttentionOptions options() const {
    AttentionOptions out;
    out.causal = spec.causal;
    out.window_left = spec.window_left;
    out.softcap = spec.softcap;
    out.seqused_k = lengths.view();
    out.cache_leftpad = leftpad.view();
    out.sink = sink.view();
    out.mask = mask.view();
    out.batch_invariant = spec.invariant;
    return out;
  }
  AttentionProblem problem() const { return checked_int4_problem(q.view(), cache(), options()); }
  HostTensor new_o() const { return HostTensor::output(spec.dtype, {spec.B(), spec.Sq, spec.H, spec.Dv}); }
  HostTensor new_lse() const { return HostTensor::output(DType::f32, {spec.B(), spec.H, spec.Sq}); }

  // Rows [from, from + count) of sequence b as an append of one sequence: view, cache, length before.
  struct Step {
    TensorView k_new, v_new;
    Int4Cache cache;
    TensorView seqlens;
  };
  // The same step of views that lie on a GPU.
  static Step step(const TensorView& k, const TensorView& v, Int4Cache cache, const TensorView& row_idx,
                   const TensorView& seqlens, std::int64_t b, std::int64_t from, std::int64_t count) {
    const auto rows = [&](TensorView view) {
      view.data = static_cast<std::byte*>(view.data) + (b * view.stride[0] + from * view.stride[1]) * 2;
      view.shape[0] = 1;
      view.shape[1] = count;
      return view;
    };
    cache.row_idx = row_idx;
    if (cache.page_table.given()) {
      cache.page_table.data = static_cast<std::byte*>(cache.page_table.data) + b * cache.page_table.stride[0] * 4;
      cache.page_table.shape[0] = 1;
    }
    return {rows(k), rows(v), cache, seqlens};
  }
  std::int64_t row_of(std::int64_t b) const { return spec.row_idx ? spec.B() + 1 - b : b; }

  // Calls append(b, from, count) until all sequences have their lengths, in steps that cross blocks in every way.
  template <class Append>
  void fill_cache(const Append& append) const {
    constexpr std::int64_t kSteps[] = {1, 70, 5, 200, 63, 64, 65, 130, 2};
    for (std::int64_t b = 0; b < spec.B(); ++b) {
      std::int64_t at = 0;
      for (std::size_t n = static_cast<std::size_t>(b); at < spec.lengths[b]; ++n) {
        const std::int64_t count = std::min<std::int64_t>(kSteps[n % std::size(kSteps)], spec.lengths[b] - at);
        append(b, at, count);
        at += count;
      }
    }
  }
  void fill_cache_on_cpu(const Rotary& rotary = {}) const {
    fill_cache([&](std::int64_t b, std::int64_t from, std::int64_t count) {
      const HostTensor row = indices({row_of(b)}), before = indices({from});
      const Step s = step(k_new.view(), v_new.view(), cache(), row.view(), before.view(), b, from, count);
      append_int4_cache(s.k_new, s.v_new, s.cache, s.seqlens, {.rotary = rotary});
    });
  }

  // What is wrong with outputs over this cache, or could not be seen to be; empty if nothing. rounds_query: the kernel
  // multiplies q with K's scales and rounds the product to float16.
  std::string verdict(const HostTensor& o, const HostTensor& lse, bool rounds_query = false) const {
    const AttentionProblem p = problem();
    const auto expected = reference::attention_forward(p, default_executor());
    const PlainForward plain = plain_forward(p, Fault::none, rounds_query);
    const double factor = allowed_factor(p, expected);
    std::string out;
    const auto judge = [&](const char* name, const HostTensor& x, const std::vector<double>& reference,
                           const PlainTensor& of_plain) {
      if (const std::string damage = x.damage(); !damage.empty()) out += std::string(name) + ": " + damage + "; ";
      const TensorView& view = x.view();
      const std::vector<std::int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
      const Comparison c = compare(name, x.values(), reference, of_plain, shape, view.dtype, factor);
      if (!c.passed) {
        out += std::string(name) + " is off by " + std::to_string(c.error) + ", allowed " + std::to_string(c.bound) +
               "; " + c.worst + "; ";
      }
      out += blind_spots(name, reference, of_plain, shape, view.dtype, factor);
    };
    judge("o", o, expected.o, plain.o);
    judge("lse", lse, expected.lse, plain.lse);
    return out;
  }

 private:
  // value(d): of an element with last index d.
  template <class Value>
  static void fill(HostTensor& x, const Value& value) {
    const std::int64_t width = x.view().shape[x.view().rank - 1];
    for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, value(n % width));
  }
};

// Cases that CPU and GPU share. on_gpu: those with head sizes that its kernel has.
inline std::vector<Int4Spec> int4_specs(bool on_gpu) {
  std::vector<Int4Spec> out;
  const auto with = [&](const char* name, auto change) {
    Int4Spec spec;
    spec.name = name;
    change(spec);
    out.push_back(spec);
  };
  with("plain", [](auto&) {});
  with("f16", [](auto& s) { s.dtype = DType::f16; });
  with("one_key", [](auto& s) { s.lengths = {1, 2}; });
  with("lengths_about_blocks", [](auto& s) { s.lengths = {63, 64, 127, 128, 129, 191, 192, 193, 256, 0}; });
  with("full", [](auto& s) { s.max_blocks = 3, s.lengths = {319, 318}; });
  with("no_blocks", [](auto& s) { s.max_blocks = 0, s.lengths = {127, 70}; });
  with("rows_4", [](auto& s) { s.Sq = 4; });
  with("rows_9_of_group_2", [](auto& s) { s.Sq = 9, s.H = 4, s.lengths = {400, 350}; });
  with("group_16", [](auto& s) { s.H = 16, s.Hkv = 1; });
  with("heads_8", [](auto& s) { s.H = 32, s.Hkv = 8; });
  with("paged", [](auto& s) { s.paged = true; });
  with("paged_rows_elsewhere", [](auto& s) { s.paged = s.row_idx = true, s.Sq = 2, s.dtype = DType::f16; });
  with("rows_elsewhere", [](auto& s) { s.row_idx = true; });
  with("window", [](auto& s) { s.window_left = 150, s.Sq = 3; });
  with("short_window", [](auto& s) { s.window_left = 10, s.paged = true; });
  with("softcap_sink", [](auto& s) { s.softcap = 20.0f, s.sink = true; });
  with("mask", [](auto& s) { s.mask = true, s.Sq = 2; });
  with("leftpad", [](auto& s) { s.leftpad = true, s.lengths = {700, 36, 300}; });
  with("not_causal", [](auto& s) { s.causal = Causal::none, s.Sq = 3; });
  with("large_values", [](auto& s) { s.scale_of_values = 3000.0f; });
  with("small_values", [](auto& s) { s.scale_of_values = 1e-3f, s.dtype = DType::f16; });
  with("batch_invariant", [](auto& s) { s.invariant = true, s.max_blocks = 30, s.lengths = {2000, 900, 64}; });
  with("long", [](auto& s) { s.max_blocks = 80, s.lengths = {5000, 3}, s.H = 4, s.Hkv = 1; });
  const auto with_64 = [&](const char* name, auto change) { with(name, [&](auto& s) { s.D = s.Dv = 64, change(s); }); };
  with_64("size_64", [](auto&) {});
  with_64("size_64_f16", [](auto& s) { s.dtype = DType::f16, s.Sq = 4, s.scale_of_values = 1e-3f; });
  with_64("size_64_lengths_about_blocks",
          [](auto& s) { s.lengths = {1, 63, 64, 127, 128, 129, 191, 192, 193, 256, 0}; });
  with_64("size_64_paged_rows_elsewhere", [](auto& s) { s.paged = s.row_idx = true, s.Sq = 2, s.H = 32, s.Hkv = 8; });
  with_64("size_64_window", [](auto& s) { s.window_left = 150, s.Sq = 9, s.H = 4, s.lengths = {400, 350}; });
  with_64("size_64_softcap_sink_mask", [](auto& s) { s.softcap = 20.0f, s.sink = s.mask = true, s.Sq = 2; });
  with_64("size_64_leftpad", [](auto& s) { s.leftpad = true, s.lengths = {700, 36, 300}; });
  with_64("size_64_large_values", [](auto& s) { s.scale_of_values = 3000.0f, s.H = 16, s.Hkv = 1; });
  with_64("size_64_batch_invariant", [](auto& s) {
    s.invariant = true, s.max_blocks = 30, s.lengths = {2000, 900, 64};
  });
  with_64("size_64_long", [](auto& s) { s.max_blocks = 80, s.lengths = {5000, 3}, s.H = 4, s.Hkv = 1; });
  if (!on_gpu) {
    with("size_192_128", [](auto& s) { s.D = 192, s.lengths = {300, 20}; });
    with("size_64_256", [](auto& s) { s.D = 64, s.Dv = 256, s.lengths = {300, 20}; });
    with("rows_70", [](auto& s) { s.Sq = 70, s.lengths = {300, 70}; });
  }
  return out;
}

}  // namespace heddle::kit

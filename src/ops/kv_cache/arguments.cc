#include "ops/kv_cache/arguments.h"

#include <algorithm>

#include "core/overlap.h"
#include "ops/kv_cache/checks.h"
#include "ops/written_indices.h"

namespace heddle {
namespace {

void check_contiguous(const Check& check, AppendProblem& p, const TensorView& k_cache,
                      const TensorView& cache_batch_idx, const First& first) {
  if (cache_batch_idx.given()) {
    p.cache_batch_idx = check_indices(check, cache_batch_idx, "cache_batch_idx", p.B, first);
  } else {
    check.require(k_cache.shape[0] == p.B, "k_cache has ", k_cache.shape[0], " rows and k_new has ", p.B,
                  " sequences: without cache_batch_idx they must be equal; found k_cache ", k_cache);
  }
  p.page_size = std::max<std::int64_t>(k_cache.shape[1], 1);
  p.capacity = k_cache.shape[1];
}

void check_paged(const Check& check, AppendProblem& p, const TensorView& k_cache, const TensorView& page_table,
                 const TensorView& cache_batch_idx, const First& first) {
  check.require(!cache_batch_idx.given(), "cache_batch_idx and page_table exclude each other");
  check.tensor(page_table, "page_table", DType::i32, first.device, 2, first.name);
  check.require(page_table.shape[0] == p.B, "page_table is ", page_table, ": it must have one row for each of ", p.B,
                " sequences");
  check.require(page_table.stride[1] == 1 || page_table.shape[1] <= 1, "page_table's rows must be contiguous");
  check.require(k_cache.shape[1] >= 1, "k_cache has pages of 0 keys: page_size must be at least 1; found k_cache ",
                k_cache);
  p.page_size = k_cache.shape[1];
  check.readable_indices(page_table, "page_table");
  p.page_table = static_cast<const std::int32_t*>(page_table.data);
  p.page_table_stride = page_table.stride[0];
  check.require(!__builtin_mul_overflow(page_table.shape[1], p.page_size, &p.capacity),
                "page_table's pages hold more keys than 63 bits count; found page_table ", page_table, ", k_cache ",
                k_cache);
}

// new_ is [B, Sn, Hkv, width], cache [.., .., Hkv, width].
void check_pair(const Check& check, const TensorView& new_, const char* new_name, const TensorView& cache,
                const char* cache_name, const TensorView& k_new, const TensorView& k_cache, const First& first) {
  check_data(check, new_, new_name, "[B, Sn, Hkv, D]", first);
  check_data(check, cache, cache_name, "[B, Smax, Hkv, D] or [pages, page_size, Hkv, D]", first,
             k_new.dtype != DType::f32);
  check.require(new_.dtype == k_new.dtype, new_name, " is ", name_of(new_.dtype), " and k_new is ",
                name_of(k_new.dtype), ": they must be equal");
  check.require(cache.dtype == k_cache.dtype, cache_name, " is ", name_of(cache.dtype), " and k_cache is ",
                name_of(k_cache.dtype), ": they must be equal");
  check.require(cache.dtype == k_new.dtype || cache.dtype == DType::f8e4m3, cache_name, " is ", name_of(cache.dtype),
                " and k_new is ", name_of(k_new.dtype), ": they must be equal");
  check.require(cache.shape[2] == new_.shape[2] && cache.shape[3] == new_.shape[3], cache_name, " is ", cache, " and ",
                new_name, " is ", new_, ": heads and head size must be equal");
  for (int i = 0; i < 3; ++i) {
    check.require(new_.shape[i] == k_new.shape[i], "v_new is ", new_, " and k_new is ", k_new, ": dimension ", i,
                  " must be equal");
  }
  for (int i = 0; i < 2; ++i) {
    check.require(cache.shape[i] == k_cache.shape[i], "v_cache is ", cache, " and k_cache is ", k_cache, ": dimension ",
                  i, " must be equal");
  }
  check.not_overlapping(cache, cache_name);
}

// finds: set if the scales are to be found: there is one for each slot and head of the cache.
Scales check_scale(const Check& check, const TensorView& scale, const char* name, const TensorView& cache,
                   const First& first, bool& finds) {
  if (!scale.given()) return {};
  check.require(cache.dtype == DType::f8e4m3, name, " is given and the cache is ", name_of(cache.dtype),
                ": scales are for a float8_e4m3fn cache");
  check.tensor(scale, name, DType::f32, first.device, 3, first.name);
  auto* const data = static_cast<float*>(scale.data);
  if (scale.shape[0] == 1 && scale.shape[1] == 1 && (scale.shape[2] == 1 || scale.shape[2] == cache.shape[2])) {
    return {data, 0, 0, scale.shape[2] == 1 ? 0 : scale.stride[2], true};
  }
  finds = true;
  for (int i = 0; i < 3; ++i) finds &= scale.shape[i] == cache.shape[i];
  check.require(finds, name, " is ", scale, ": it must be [1, 1, Hkv] = [1, 1, ", cache.shape[2],
                "] or [1, 1, 1], to be read, or the cache's shape without its last extent, [", cache.shape[0], ", ",
                cache.shape[1], ", ", cache.shape[2], "], to be written");
  check.not_overlapping(scale, name);
  return {data, scale.stride[0], scale.stride[1], scale.stride[2], true};
}

}  // namespace

AppendProblem checked_append_problem(const Check& check, const TensorView& k_new, const TensorView& v_new,
                                     const TensorView& k_cache, const TensorView& v_cache, const TensorView& seqlens,
                                     const AppendOptions& options, IndexName seqlens_name) {
  const TensorView &page_table = options.page_table, &cache_batch_idx = options.cache_batch_idx;
  const TensorView &k_scale = options.k_scale, &v_scale = options.v_scale;
  const Rotary& rotary = options.rotary;
  const First first{"k_new", k_new.device};
  check_pair(check, k_new, "k_new", k_cache, "k_cache", k_new, k_cache, first);
  check_pair(check, v_new, "v_new", v_cache, "v_cache", k_new, k_cache, first);

  AppendProblem p;
  p.k_new = operand_of(k_new);
  p.v_new = operand_of(v_new);
  p.k_cache = operand_of(k_cache);
  p.v_cache = operand_of(v_cache);
  p.device = k_new.device;
  p.B = k_new.shape[0];
  p.S = k_new.shape[1];
  p.Hkv = k_new.shape[2];
  p.D = k_new.shape[3];
  p.Dv = v_new.shape[3];
  p.seqlens = check_indices(check, seqlens, name_of(seqlens_name), p.B, first);
  p.pages = k_cache.shape[0];
  p.k_scale = check_scale(check, k_scale, "k_scale", k_cache, first, p.finds_k_scale);
  p.v_scale = check_scale(check, v_scale, "v_scale", v_cache, first, p.finds_v_scale);
  if (page_table.given()) {
    check_paged(check, p, k_cache, page_table, cache_batch_idx, first);
  } else {
    check_contiguous(check, p, k_cache, cache_batch_idx, first);
  }
  if (rotary.cos.given() || rotary.sin.given()) p.rotary = check_rotary(check, rotary, k_new, first);
  if (first.readable()) check_written_indices(check, p, seqlens_name);
  // Also the index data must lie elsewhere: a cache write that changed it would undo the checks above.
  const auto check_written = [&](const TensorView& written, const char* name) {
    check_apart(check, written, name, k_new, "k_new");
    check_apart(check, written, name, v_new, "v_new");
    check_apart(check, written, name, seqlens, name_of(seqlens_name));
    check_apart(check, written, name, page_table, "page_table");
    check_apart(check, written, name, cache_batch_idx, "cache_batch_idx");
    check_apart(check, written, name, rotary.cos, "cos");
    check_apart(check, written, name, rotary.sin, "sin");
  };
  for (const auto& [cache, name] : {std::pair{&k_cache, "k_cache"}, std::pair{&v_cache, "v_cache"}}) {
    check_written(*cache, name);
    check_apart(check, *cache, name, k_scale, "k_scale");
    check_apart(check, *cache, name, v_scale, "v_scale");
  }
  if (p.finds_k_scale) check_written(k_scale, "k_scale");
  if (p.finds_v_scale) check_written(v_scale, "v_scale");
  if (p.finds_k_scale || p.finds_v_scale) {
    check.require(!k_scale.given() || !v_scale.given() || !may_share_memory(k_scale, v_scale),
                  "v_scale shares memory with k_scale, and scales are written");
  }
  check.require(!may_share_memory(k_cache, v_cache), "v_cache shares memory with k_cache: both are written");
  return p;
}

}  // namespace heddle

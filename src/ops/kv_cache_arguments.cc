#include "ops/kv_cache_arguments.h"

#include <algorithm>
#include <array>
#include <memory_resource>
#include <vector>

#include "core/overlap.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;

Operand operand(const TensorView& view) {
  Operand x;
  x.data = static_cast<std::byte*>(view.data);
  x.dtype = view.dtype;
  x.stride_b = view.stride[0];
  x.stride_s = view.stride[1];
  x.stride_h = view.stride[2];
  x.stride_d = view.stride[3];
  return x;
}

// The first tensor of a call: all others are on its device.
struct First {
  const char* name;
  Device device;
  // Whether index data may be read here: on a GPU it is not, because that would wait for the stream.
  bool readable() const { return device == Device::cpu; }
};

// A rank 4 tensor of a floating-point dtype (for a cache also f8e4m3).
void check_data(const Check& check, const TensorView& view, const char* name, const char* layout, const First& first,
                bool narrow = false) {
  check.require(view.given(), name, " is missing");
  check.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16 ||
                    (narrow && view.dtype == DType::f8e4m3),
                name, " is ", name_of(view.dtype), ": it must be float32, float16 or bfloat16",
                narrow ? " (or float8_e4m3fn beside 16-bit rows)" : "");
  check.require(view.device == first.device, name, " is on another device than ", first.name);
  check.require(view.rank == 4, name, " has ", view.rank, " dimensions: it must be ", layout, "; found ", name, " ",
                view);
  check.addressable(view, name);
  check.require(view.shape[3] <= kMaxHeadSize, name, " has head size ", view.shape[3], ": it must be at most ",
                kMaxHeadSize, "; found ", name, " ", view);
}

const std::int32_t* check_indices(const Check& check, const TensorView& view, const char* name, std::int64_t count,
                                  const First& first) {
  check.tensor(view, name, DType::i32, first.device, 1, first.name);
  check.require(view.shape[0] == count, name, " has ", view.shape[0], " entries: it must have ", count);
  check.require(view.stride[0] == 1 || count <= 1, name, " must be contiguous");
  return static_cast<const std::int32_t*>(view.data);
}

void check_apart(const Check& check, const TensorView& written, const char* written_name, const TensorView& read,
                 const char* read_name) {
  check.require(!read.given() || !may_share_memory(written, read), written_name, " shares memory with ", read_name,
                ", which is read meanwhile: give it memory of its own");
}

// `data` is what is rotated, [.., D].
RotaryTables check_rotary(const Check& check, const Rotary& rotary, const TensorView& data, const First& first) {
  const char* name = first.name;
  check.require(rotary.cos.given() && rotary.sin.given(), rotary.cos.given() ? "sin" : "cos",
                " is missing: rotary needs both cos and sin");
  check.require(rotary.cos.dtype == DType::f32 || rotary.cos.dtype == data.dtype, "cos is ", name_of(rotary.cos.dtype),
                ": it must be float32 or ", name, "'s dtype, ", name_of(data.dtype));
  check.tensor(rotary.cos, "cos", rotary.cos.dtype, first.device, 2, name);
  check.tensor(rotary.sin, "sin", rotary.cos.dtype, first.device, 2, name);
  check.require(rotary.sin.shape == rotary.cos.shape, "sin is ", rotary.sin, ": it must have the shape of cos, ",
                rotary.cos);
  const std::int64_t dims = 2 * std::min(rotary.cos.shape[1], kMaxHeadSize);
  check.require(dims <= data.shape[3], "cos has ", rotary.cos.shape[1], " columns, for R = 2 * ", rotary.cos.shape[1],
                " rotated dimensions: R must be at most ", name, "'s head size, ", data.shape[3]);
  RotaryTables tables;
  tables.cos = static_cast<const std::byte*>(rotary.cos.data);
  tables.sin = static_cast<const std::byte*>(rotary.sin.data);
  tables.dtype = rotary.cos.dtype;
  tables.cos_row = rotary.cos.stride[0];
  tables.cos_column = rotary.cos.stride[1];
  tables.sin_row = rotary.sin.stride[0];
  tables.sin_column = rotary.sin.stride[1];
  tables.positions = rotary.cos.shape[0];
  tables.dims = dims;
  tables.interleaved = rotary.interleaved;
  check.require(tables.positions > 0 || data.elements() == 0, "cos has no rows, and ", name, " has some to rotate");
  return tables;
}

// Positions first .. first + count - 1 of sequence b must lie below `limit`.
void check_positions(const Check& check, const char* name, std::int64_t b, std::int64_t first, std::int64_t count,
                     std::int64_t limit, const char* limit_name) {
  check.require(first >= 0, name, "[", b, "] is ", first, ": it must be at least 0");
  check.require(first + count <= limit, name, "[", b, "] is ", first, ": with ", count, " rows sequence ", b,
                " ends at position ", first + count, ", and ", limit_name, " ", limit);
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.shape == b.shape && a.stride == b.stride;
}

// Slots [begin, end) of one page, written by rows of sequence b from position `first` on.
struct Piece {
  std::int64_t page, begin, end, b, first;
};

// Two rows of one call must not land in one slot: which of them stays would depend on the threads.
void check_distinct(const Check& check, const AppendProblem& p) {
  // Decoding writes a piece per sequence; this much of the stack serves a batch of 400 without the heap.
  std::array<std::byte, 16 << 10> stack;
  std::pmr::monotonic_buffer_resource memory(stack.data(), stack.size());
  std::pmr::vector<Piece> pieces(&memory);
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.B && p.S > 0; ++b) {
    count += (p.seqlens[b] + p.S - 1) / p.page_size - p.seqlens[b] / p.page_size + 1;
  }
  pieces.reserve(static_cast<std::size_t>(count));
  for (std::int64_t b = 0; b < p.B; ++b) {
    const std::int64_t end = p.seqlens[b] + p.S;
    for (std::int64_t at = p.seqlens[b]; at < end;) {
      const std::int64_t slot = at % p.page_size, length = std::min(p.page_size - slot, end - at);
      pieces.push_back({p.page(b, at), slot, slot + length, b, at});
      at += length;
    }
  }
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& x, const Piece& y) { return x.page != y.page ? x.page < y.page : x.begin < y.begin; });
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    const Piece &x = pieces[i - 1], &y = pieces[i];
    if (x.page != y.page || y.begin >= x.end) continue;
    check.require(false, "position ", x.first + y.begin - x.begin, " of sequence ", x.b, " and position ", y.first,
                  " of sequence ", y.b, " are both slot ", y.begin, " of ",
                  p.page_table != nullptr ? "page " : "cache row ", y.page,
                  ": the rows of one call must go to slots of their own");
  }
}

void check_contiguous(const Check& check, AppendProblem& p, const TensorView& k_cache,
                      const TensorView& cache_batch_idx, const First& first) {
  if (cache_batch_idx.given()) {
    p.cache_batch_idx = check_indices(check, cache_batch_idx, "cache_batch_idx", p.B, first);
    for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
      check.require(p.cache_batch_idx[b] >= 0 && p.cache_batch_idx[b] < k_cache.shape[0], "cache_batch_idx[", b,
                    "] is ", p.cache_batch_idx[b], ": it must be from 0 to ", k_cache.shape[0] - 1, " (k_cache has ",
                    k_cache.shape[0], " rows)");
    }
  } else {
    check.require(k_cache.shape[0] == p.B, "k_cache has ", k_cache.shape[0], " rows and k_new has ", p.B,
                  " sequences: without cache_batch_idx they must be equal; found k_cache ", k_cache);
  }
  p.page_size = std::max<std::int64_t>(k_cache.shape[1], 1);
  p.capacity = k_cache.shape[1];
  for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
    check_positions(check, "seqlens", b, p.seqlens[b], p.S, p.capacity, "the cache's rows hold");
  }
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
  p.page_table = static_cast<const std::int32_t*>(page_table.data);
  p.page_table_stride = page_table.stride[0];
  check.require(!__builtin_mul_overflow(page_table.shape[1], p.page_size, &p.capacity),
                "page_table's pages hold more keys than 63 bits count; found page_table ", page_table, ", k_cache ",
                k_cache);
  for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
    check_positions(check, "seqlens", b, p.seqlens[b], p.S, p.capacity, "page_table's pages hold");
    const std::int64_t end = p.seqlens[b] + p.S;
    for (std::int64_t entry = p.seqlens[b] / p.page_size; p.S > 0 && entry * p.page_size < end; ++entry) {
      const std::int32_t id = p.page_table[b * p.page_table_stride + entry];
      check.require(id >= 0 && id < k_cache.shape[0], "page_table[", b, ", ", entry, "] is ", id,
                    ": it must be from 0 to ", k_cache.shape[0] - 1, " (k_cache has ", k_cache.shape[0], " pages)");
    }
  }
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

Scales check_scale(const Check& check, const TensorView& scale, const char* name, const TensorView& cache,
                   const First& first) {
  if (!scale.given()) return {};
  check.require(cache.dtype == DType::f8e4m3, name, " is given and the cache is ", name_of(cache.dtype),
                ": scales are for a float8_e4m3fn cache");
  check.tensor(scale, name, DType::f32, first.device, 3, first.name);
  check.require(scale.shape[0] == 1 && scale.shape[1] == 1 && (scale.shape[2] == 1 || scale.shape[2] == cache.shape[2]),
                name, " is ", scale, ": it must be [1, 1, Hkv] = [1, 1, ", cache.shape[2], "] or [1, 1, 1]");
  return {static_cast<const float*>(scale.data), 0, 0, scale.shape[2] == 1 ? 0 : scale.stride[2]};
}

}  // namespace

RotaryProblem checked_rotary_problem(const Check& check, const TensorView& x, const TensorView& out,
                                     const Rotary& rotary, const TensorView& offsets) {
  const First first{"x", x.device};
  check_data(check, x, "x", "[B, S, H, D]", first);
  check_data(check, out, "out", "[B, S, H, D]", first);
  check.require(out.dtype == x.dtype, "out is ", name_of(out.dtype), ": it must have x's dtype, ", name_of(x.dtype));
  check.require(out.shape == x.shape, "out is ", out, ": it must have the shape of x, ", x);
  check.not_overlapping(out, "out");

  RotaryProblem p;
  p.x = operand(x);
  p.out = operand(out);
  p.B = x.shape[0];
  p.S = x.shape[1];
  p.H = x.shape[2];
  p.D = x.shape[3];
  p.rotary = check_rotary(check, rotary, x, first);
  if (offsets.given()) p.offsets = check_indices(check, offsets, "offsets", p.B, first);
  for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
    check_positions(check, "offsets", b, p.offsets != nullptr ? p.offsets[b] : 0, p.S, rotary.cos.shape[0],
                    "cos's rows number");
  }
  check.require(same_view(x, out) || !may_share_memory(out, x),
                "out shares memory with x without being x itself: rotate in place or give out memory of its own");
  check_apart(check, out, "out", rotary.cos, "cos");
  check_apart(check, out, "out", rotary.sin, "sin");
  check_apart(check, out, "out", offsets, "offsets");
  return p;
}

AppendProblem checked_append_problem(const Check& check, const TensorView& k_new, const TensorView& v_new,
                                     const TensorView& k_cache, const TensorView& v_cache, const TensorView& seqlens,
                                     const TensorView& page_table, const TensorView& cache_batch_idx,
                                     const Rotary& rotary, const TensorView& k_scale, const TensorView& v_scale) {
  const First first{"k_new", k_new.device};
  check_pair(check, k_new, "k_new", k_cache, "k_cache", k_new, k_cache, first);
  check_pair(check, v_new, "v_new", v_cache, "v_cache", k_new, k_cache, first);

  AppendProblem p;
  p.k_new = operand(k_new);
  p.v_new = operand(v_new);
  p.k_cache = operand(k_cache);
  p.v_cache = operand(v_cache);
  p.B = k_new.shape[0];
  p.S = k_new.shape[1];
  p.Hkv = k_new.shape[2];
  p.D = k_new.shape[3];
  p.Dv = v_new.shape[3];
  p.seqlens = check_indices(check, seqlens, "seqlens", p.B, first);
  p.pages = k_cache.shape[0];
  p.k_scale = check_scale(check, k_scale, "k_scale", k_cache, first);
  p.v_scale = check_scale(check, v_scale, "v_scale", v_cache, first);
  if (page_table.given()) {
    check_paged(check, p, k_cache, page_table, cache_batch_idx, first);
  } else {
    check_contiguous(check, p, k_cache, cache_batch_idx, first);
  }
  if (rotary.cos.given() || rotary.sin.given()) {
    p.rotary = check_rotary(check, rotary, k_new, first);
    for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
      check_positions(check, "seqlens", b, p.seqlens[b], p.S, rotary.cos.shape[0], "cos's rows number");
    }
  }
  if (first.readable()) check_distinct(check, p);
  // Also the index data must lie elsewhere: a cache write that changed it would undo the checks above.
  for (const auto& [cache, name] : {std::pair{&k_cache, "k_cache"}, std::pair{&v_cache, "v_cache"}}) {
    check_apart(check, *cache, name, k_new, "k_new");
    check_apart(check, *cache, name, v_new, "v_new");
    check_apart(check, *cache, name, seqlens, "seqlens");
    check_apart(check, *cache, name, page_table, "page_table");
    check_apart(check, *cache, name, cache_batch_idx, "cache_batch_idx");
    check_apart(check, *cache, name, rotary.cos, "cos");
    check_apart(check, *cache, name, rotary.sin, "sin");
    check_apart(check, *cache, name, k_scale, "k_scale");
    check_apart(check, *cache, name, v_scale, "v_scale");
  }
  check.require(!may_share_memory(k_cache, v_cache), "v_cache shares memory with k_cache: both are written");
  return p;
}

}  // namespace heddle

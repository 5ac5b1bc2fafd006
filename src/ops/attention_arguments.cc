#include "ops/attention_arguments.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "core/overlap.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256;
constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();  // positions are 32-bit in index data

Operand operand(const TensorView& view, bool packed) {
  Operand x;
  x.data = static_cast<std::byte*>(view.data);
  x.dtype = view.dtype;
  const int row = packed ? 0 : 1;
  x.stride_b = packed ? 0 : view.stride[0];
  x.stride_s = view.stride[row];
  x.stride_h = view.stride[row + 1];
  x.stride_d = view.stride[row + 2];
  // A view without elements may have no address; kernels then touch none, but "given" must show.
  static std::byte nothing;
  if (x.data == nullptr) x.data = &nothing;
  return x;
}

class Builder {
 public:
  Builder(const Check& check, const TensorView& q, const TensorView& k, const TensorView& v,
          const AttentionOptions& options)
      : check_(check), options_(options), q_(q), k_(k), v_(v) {}

  void build(AttentionProblem& p) {
    operands(p);
    lengths(p);
    cache(p);
    used(p);
    scores(p);
    per_head(p);
    planes(p);
    draft(p);
    all_scales(p);
    p.precision = options_.precision;
    p.dropout = options_.dropout;
    p.batch_invariant = options_.batch_invariant;
    p.deterministic = options_.deterministic;
  }

  bool packed_q() const { return options_.cu_seqlens_q.given(); }
  bool packed_k() const { return options_.cu_seqlens_k.given(); }

  // An o-shaped (q's rows and heads, Dv columns) or q-shaped tensor.
  Operand rows_like_q(const AttentionProblem& p, const TensorView& view, const char* name, std::int64_t width) const {
    if (q_.dtype == DType::f8e4m3) {
      check_.require(view.dtype == DType::bf16 || view.dtype == DType::f16, name, " is ", name_of(view.dtype),
                     ": beside q of float8_e4m3fn it must be bfloat16 or float16");
      check_.tensor(view, name, view.dtype, q_.device, q_.rank);
    } else {
      same_kind(view, name, q_.rank);
    }
    for (int i = 0; i < q_.rank - 1; ++i) {
      check_.require(view.shape[i] == q_.shape[i], name, " is ", view, ": dimension ", i, " must be q's, ", q_.shape[i],
                     "; found q ", q_);
    }
    check_.require(view.shape[q_.rank - 1] == width, name, " is ", view, ": its last extent must be ", width, " (",
                   width == p.Dv ? "v's head size" : "q's head size", ")");
    return operand(view, packed_q());
  }

  Operand like(const TensorView& view, const char* name, const TensorView& model, const char* model_name,
               bool packed) const {
    same_kind(view, name, model.rank);
    for (int i = 0; i < model.rank; ++i) {
      check_.require(view.shape[i] == model.shape[i], name, " is ", view, ": it must have the shape of ", model_name,
                     ", ", model);
    }
    return operand(view, packed);
  }

  // f32 [B, H, Sq], packed [H, total].
  Plane per_row(const AttentionProblem& p, const TensorView& view, const char* name) const {
    check_.tensor(view, name, DType::f32, q_.device, packed_q() ? 2 : 3);
    Plane plane{static_cast<std::byte*>(view.data), DType::f32};
    if (packed_q()) {
      check_.require(view.shape[0] == p.H && view.shape[1] == q_.shape[0], name, " is ", view,
                     ": it must be [H, total_q] = [", p.H, ", ", q_.shape[0], "]");
      plane.stride_h = view.stride[0];
      plane.stride_i = view.stride[1];
    } else {
      check_.require(view.shape[0] == p.B && view.shape[1] == p.H && view.shape[2] == p.Sq, name, " is ", view,
                     ": it must be [B, H, Sq] = [", p.B, ", ", p.H, ", ", p.Sq, "]");
      plane.stride_b = view.stride[0];
      plane.stride_h = view.stride[1];
      plane.stride_i = view.stride[2];
    }
    static std::byte nothing;
    if (plane.data == nullptr) plane.data = &nothing;
    return plane;
  }

  // [B|1, H|1, Sq|1, Sk|1]
  Plane plane(const AttentionProblem& p, const TensorView& view, const char* name) const {
    check_.require(view.rank == 4, name, " has ", view.rank,
                   " dimensions: it must have 4, each 1 or that of [B, H, Sq, Sk]");
    check_.require(view.device == q_.device, name, " is on another device than q");
    check_.addressable(view, name);
    const std::int64_t full[4] = {p.B, p.H, p.Sq, p.Sk};
    Plane plane{static_cast<std::byte*>(view.data), view.dtype};
    std::int64_t* strides[4] = {&plane.stride_b, &plane.stride_h, &plane.stride_i, &plane.stride_j};
    for (int i = 0; i < 4; ++i) {
      check_.require(view.shape[i] == full[i] || view.shape[i] == 1, name, " is ", view, ": dimension ", i,
                     " must be 1 or ", full[i], " (of [B, H, Sq, Sk] = [", p.B, ", ", p.H, ", ", p.Sq, ", ", p.Sk,
                     "])");
      *strides[i] = view.shape[i] == 1 ? 0 : view.stride[i];
    }
    return plane;
  }

 private:
  // Whether index data may be read here: on a GPU it is not, because that would wait for the stream.
  bool readable() const { return q_.device == Device::cpu; }

  void same_kind(const TensorView& view, const char* name, int rank) const {
    check_.tensor(view, name, q_.dtype, q_.device, rank);
  }

  void operands(AttentionProblem& p) const {
    check_.require(q_.given(), "q is missing");
    const bool narrow = q_.dtype == DType::f16 || q_.dtype == DType::bf16;
    check_.require(q_.dtype == DType::f32 || narrow || q_.dtype == DType::f8e4m3, "q is ", name_of(q_.dtype),
                   ": attention takes float32, float16, bfloat16 or float8_e4m3fn");
    const int q_rank = packed_q() ? 3 : 4, k_rank = packed_k() ? 3 : 4;
    check_.require(q_.rank == q_rank, "q has ", q_.rank, " dimensions: ",
                   packed_q() ? "with cu_seqlens_q it must be [total_q, H, D]" : "it must be [B, Sq, H, D]",
                   "; found q ", q_);
    check_.addressable(q_, "q");
    const DType k_dtype = narrow && k_.dtype == DType::f8e4m3 ? k_.dtype : q_.dtype;
    check_.tensor(k_, "k", k_dtype, q_.device, k_rank);
    check_.require(v_.dtype == k_.dtype, "v is ", name_of(v_.dtype), " and k is ", name_of(k_.dtype),
                   ": they must be equal");
    check_.tensor(v_, "v", k_dtype, q_.device, k_rank);
    p.dtype = q_.dtype;
    p.device = q_.device;
    p.H = q_.shape[q_rank - 2];
    p.D = q_.shape[q_rank - 1];
    p.Hkv = k_.shape[k_rank - 2];
    p.Dv = v_.shape[k_rank - 1];
    check_.require(p.D >= 1 && p.D <= kMaxHeadSize, "q has head size ", p.D, ": it must be from 1 to ", kMaxHeadSize,
                   "; found q ", q_);
    check_.require(k_.shape[k_rank - 1] == p.D, "k has head size ", k_.shape[k_rank - 1], " and q has ", p.D,
                   ": they must be equal; found q ", q_, ", k ", k_);
    check_.require(p.Dv >= 1 && p.Dv <= kMaxHeadSize, "v has head size ", p.Dv, ": it must be from 1 to ", kMaxHeadSize,
                   "; found v ", v_);
    check_.require(p.H >= 1 && p.Hkv >= 1 && p.H % p.Hkv == 0, "k has ", p.Hkv, " heads and q has ", p.H,
                   ": q's heads must be a multiple of k's; found q ", q_, ", k ", k_);
    for (int i = 0; i < k_rank - 1; ++i) {
      check_.require(v_.shape[i] == k_.shape[i], "v has extent ", v_.shape[i], " in dimension ", i, " and k has ",
                     k_.shape[i], ": they must be equal; found k ", k_, ", v ", v_);
    }
    p.G = p.H / p.Hkv;
    p.q_rows = q_.shape[q_rank - 3];
    p.k_rows = k_.shape[k_rank - 3];
    p.k_batches = packed_k() ? 1 : k_.shape[0];
    p.q = operand(q_, packed_q());
    p.k = operand(k_, packed_k());
    p.v = operand(v_, packed_k());
  }

  const std::int32_t* indices(const TensorView& view, const char* name, std::int64_t length) const {
    check_.tensor(view, name, DType::i32, q_.device, 1);
    check_.require(view.shape[0] == length, name, " has ", view.shape[0], " entries: it must have ", length);
    check_.require(view.stride[0] == 1 || view.shape[0] <= 1, name, " must be contiguous");
    return static_cast<const std::int32_t*>(view.data);
  }

  // Checks one cu_seqlens and returns its longest sequence.
  std::int64_t longest(const TensorView& cu, const char* name, std::int64_t total, const char* packed_name) const {
    const std::int32_t* at = indices(cu, name, cu.shape[0]);
    const std::int64_t count = cu.shape[0] - 1;
    check_.require(at[0] == 0, name, "[0] is ", at[0], ": it must be 0");
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < count; ++b) {
      check_.require(at[b + 1] >= at[b], name, " decreases from ", at[b], " to ", at[b + 1], " at entry ", b + 1,
                     ": it must never decrease");
      longest = std::max<std::int64_t>(longest, at[b + 1] - at[b]);
    }
    check_.require(at[count] == total, name, " ends at ", at[count], ": it must end at ", packed_name,
                   "'s first extent, ", total);
    return longest;
  }

  std::int64_t packed_length(const TensorView& cu, const char* name, const TensorView& x, const char* x_name,
                             std::int64_t bound, const char* bound_name) const {
    check_.require(cu.rank == 1 && cu.shape[0] >= 1, name, " is ", cu, ": it must be int32 [B + 1]");
    check_.require(bound >= 0, bound_name, " is ", bound, ": it must be at least 0");
    if (!readable()) {
      indices(cu, name, cu.shape[0]);
      check_.require(bound > 0 || x.shape[0] == 0, bound_name, " is 0: ", name,
                     " is on a GPU, where lengths are not read, so an upper bound must be given");
      return std::min(bound, x.shape[0]);
    }
    const std::int64_t found = longest(cu, name, x.shape[0], x_name);
    check_.require(bound == 0 || bound >= found, bound_name, " is ", bound, ": the longest sequence has ", found);
    return bound == 0 ? found : bound;
  }

  void lengths(AttentionProblem& p) {
    const bool paged = options_.page_table.given();
    check_.require(!(paged && packed_k()),
                   "page_table and cu_seqlens_k exclude each other: give the lengths as seqused_k");
    if (packed_q()) {
      p.Sq = packed_length(options_.cu_seqlens_q, "cu_seqlens_q", q_, "q", options_.max_seqlen_q, "max_seqlen_q");
      p.B = options_.cu_seqlens_q.shape[0] - 1;
      p.cu_seqlens_q = static_cast<const std::int32_t*>(options_.cu_seqlens_q.data);
    } else {
      p.B = q_.shape[0];
      p.Sq = q_.shape[1];
    }
    if (packed_k()) {
      p.Sk = packed_length(options_.cu_seqlens_k, "cu_seqlens_k", k_, "k", options_.max_seqlen_k, "max_seqlen_k");
      check_.require(options_.cu_seqlens_k.shape[0] == p.B + 1, "cu_seqlens_k has ", options_.cu_seqlens_k.shape[0],
                     " entries: for ", p.B, " sequences of q it must have ", p.B + 1);
      p.cu_seqlens_k = static_cast<const std::int32_t*>(options_.cu_seqlens_k.data);
    } else if (!paged) {
      p.Sk = k_.shape[1];
    }
  }

  void cache(AttentionProblem& p) const {
    const TensorView& table = options_.page_table;
    if (table.given()) {
      check_.tensor(table, "page_table", DType::i32, q_.device, 2);
      check_.require(table.shape[0] == p.B, "page_table is ", table, ": it must have one row for each of ", p.B,
                     " sequences");
      check_.require(table.stride[1] == 1 || table.shape[1] <= 1, "page_table's rows must be contiguous");
      p.page_size = k_.shape[1];
      check_.require(p.page_size >= 1, "k has pages of 0 keys: page_size must be at least 1; found k ", k_);
      check_.require(table.shape[1] <= kMaxLength / p.page_size, "page_table has ", table.shape[1], " pages of ",
                     p.page_size, " keys for a sequence: it must have fewer than 2^31 keys");
      p.Sk = table.shape[1] * p.page_size;
      p.page_table = static_cast<const std::int32_t*>(table.data);
      p.page_table_stride = table.stride[0];
      check_.require(!options_.cache_batch_idx.given(), "cache_batch_idx and page_table exclude each other");
    } else if (options_.cache_batch_idx.given()) {
      check_.require(!packed_k(), "cache_batch_idx and cu_seqlens_k exclude each other");
      p.cache_batch_idx = indices(options_.cache_batch_idx, "cache_batch_idx", p.B);
      for (std::int64_t b = 0; readable() && b < p.B; ++b) {
        check_.require(p.cache_batch_idx[b] >= 0 && p.cache_batch_idx[b] < k_.shape[0], "cache_batch_idx[", b, "] is ",
                       p.cache_batch_idx[b], ": it must be from 0 to ", k_.shape[0] - 1);
      }
    } else if (!packed_k()) {
      check_.require(k_.shape[0] == p.B, "k has ", k_.shape[0], " sequences and q has ", p.B,
                     ": they must be equal; found q ", q_, ", k ", k_);
    }
    check_.require(p.B <= kMaxLength && p.H <= kMaxLength, "q has ", p.B, " sequences and ", p.H,
                   " heads: each must be below 2^31");
    check_.require(p.Sq <= kMaxLength && p.Sk <= kMaxLength, "sequences of ", p.Sq, " rows and ", p.Sk,
                   " keys: lengths must be below 2^31");
  }

  void used(AttentionProblem& p) const {
    if (options_.seqused_q.given()) p.seqused_q = indices(options_.seqused_q, "seqused_q", p.B);
    if (options_.seqused_k.given()) p.seqused_k = indices(options_.seqused_k, "seqused_k", p.B);
    if (options_.cache_leftpad.given()) {
      check_.require(!packed_k(), "cache_leftpad and cu_seqlens_k exclude each other");
      p.cache_leftpad = indices(options_.cache_leftpad, "cache_leftpad", p.B);
    }
    for (std::int64_t b = 0; readable() && b < p.B; ++b) {
      const std::int64_t rows = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.Sq;
      const std::int64_t keys = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.Sk;
      if (p.seqused_q) {
        check_.require(p.seqused_q[b] >= 0 && p.seqused_q[b] <= rows, "seqused_q[", b, "] is ", p.seqused_q[b],
                       ": it must be from 0 to the sequence's length, ", rows);
      }
      if (p.seqused_k) {
        check_.require(p.seqused_k[b] >= 0 && p.seqused_k[b] <= keys, "seqused_k[", b, "] is ", p.seqused_k[b],
                       ": it must be from 0 to the sequence's length, ", keys);
      }
      const std::int64_t slots = p.seqused_k ? p.seqused_k[b] : keys;
      if (p.cache_leftpad) {
        check_.require(p.cache_leftpad[b] >= 0 && p.cache_leftpad[b] <= slots, "cache_leftpad[", b, "] is ",
                       p.cache_leftpad[b], ": it must be from 0 to the used length, ", slots);
      }
      if (p.page_table) check_pages(p, b, slots);
    }
  }

  void check_pages(const AttentionProblem& p, std::int64_t b, std::int64_t slots) const {
    const std::int64_t first = p.cache_leftpad ? p.cache_leftpad[b] / p.page_size : 0;
    for (std::int64_t page = first; page * p.page_size < slots; ++page) {
      const std::int32_t id = p.page_table[b * p.page_table_stride + page];
      check_.require(id >= 0 && id < k_.shape[0], "page_table[", b, ", ", page, "] is ", id, ": it must be from 0 to ",
                     k_.shape[0] - 1, " (k has ", k_.shape[0], " pages)");
    }
  }

  void scores(AttentionProblem& p) const {
    p.scale = options_.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.D)));
    check_.require(std::isfinite(p.scale), "scale is ", p.scale, ": it must be finite");
    p.softcap = options_.softcap;
    check_.require(std::isfinite(p.softcap) && p.softcap >= 0, "softcap is ", p.softcap,
                   ": it must be finite and at least 0 (0: none)");
    check_.require(options_.window_left >= -1 && options_.window_right >= -1, "window is (", options_.window_left, ", ",
                   options_.window_right, "): each side must be at least 0, or -1 for open");
    p.causal = options_.causal;
    // Wider than any two positions are apart is the same as open, and keeps sums with positions in range.
    p.window_left = std::min(options_.window_left, 2 * kMaxLength);
    p.window_right = std::min(options_.window_right, 2 * kMaxLength);
    const float drop = options_.dropout.p;
    check_.require(drop >= 0 && drop < 1, "dropout.p is ", drop, ": it must be in [0, 1)");
  }

  void per_head(AttentionProblem& p) const {
    const TensorView& slopes = options_.alibi_slopes;
    if (slopes.given()) {
      check_.require(slopes.rank == 1 || slopes.rank == 2, "alibi_slopes is ", slopes, ": it must be [H] or [B, H]");
      check_.tensor(slopes, "alibi_slopes", DType::f32, q_.device, slopes.rank);
      check_.require(slopes.shape[slopes.rank - 1] == p.H && (slopes.rank == 1 || slopes.shape[0] == p.B),
                     "alibi_slopes is ", slopes, ": it must be [H] = [", p.H, "] or [B, H] = [", p.B, ", ", p.H, "]");
      p.alibi.data = static_cast<std::byte*>(slopes.data);
      p.alibi.stride_b = slopes.rank == 2 ? slopes.stride[0] : 0;
      p.alibi.stride_h = slopes.stride[slopes.rank - 1];
    }
    const TensorView& sink = options_.sink;
    if (sink.given()) {
      check_.tensor(sink, "sink", DType::f32, q_.device, 1);
      check_.require(sink.shape[0] == p.H, "sink is ", sink, ": it must have one logit for each of ", p.H, " heads");
      p.sink.data = static_cast<std::byte*>(sink.data);
      p.sink.stride_h = sink.stride[0];
    }
  }

  void planes(AttentionProblem& p) const {
    if (options_.bias.given()) {
      check_.require((options_.bias.dtype == p.dtype && p.dtype != DType::f8e4m3) || options_.bias.dtype == DType::f32,
                     "bias is ", name_of(options_.bias.dtype), ": it must be float32",
                     p.dtype == DType::f8e4m3 ? "" : " or q's dtype, ",
                     p.dtype == DType::f8e4m3 ? "" : name_of(p.dtype));
      p.bias = plane(p, options_.bias, "bias");
    }
    if (options_.mask.given()) {
      check_.require(options_.mask.dtype == DType::boolean, "mask is ", name_of(options_.mask.dtype),
                     ": it must be bool (true = attend); pass numbers that are added as bias");
      p.mask = plane(p, options_.mask, "mask");
    }
  }

  void draft(AttentionProblem& p) const {
    const TensorView& mask = options_.draft_mask;
    if (!mask.given()) return;
    check_.tensor(mask, "draft_mask", DType::i32, q_.device, 2);
    check_.require(p.Sq <= 32, "draft_mask is given and q has ", p.Sq, " rows a sequence: a draft has at most 32");
    check_.require(mask.shape[0] == p.B && mask.shape[1] == p.Sq, "draft_mask is ", mask, ": it must be [B, Sq] = [",
                   p.B, ", ", p.Sq, "]");
    check_.require(mask.stride[1] == 1 || p.Sq <= 1, "draft_mask's rows must be contiguous");
    p.draft_mask = static_cast<const std::int32_t*>(mask.data);
    p.draft_mask_stride = mask.stride[0];
  }

  // The shape of `data` without its last extent, each extent that or 1.
  Scales scales(const TensorView& view, const char* name, const TensorView& data, const char* data_name,
                bool packed) const {
    if (!view.given()) return {};
    check_.require(data.dtype == DType::f8e4m3, name, " is given and ", data_name, " is ", name_of(data.dtype),
                   ": scales belong to float8_e4m3fn");
    check_.tensor(view, name, DType::f32, q_.device, data.rank - 1);
    for (int i = 0; i < data.rank - 1; ++i) {
      check_.require(view.shape[i] == data.shape[i] || view.shape[i] == 1, name, " is ", view, ": dimension ", i,
                     " must be 1 or ", data_name, "'s, ", data.shape[i], "; found ", data_name, " ", data);
    }
    const auto stride = [&](int i) { return view.shape[i] == 1 ? 0 : view.stride[i]; };
    const int row = packed ? 0 : 1;
    return {static_cast<const float*>(view.data), packed ? 0 : stride(0), stride(row), stride(row + 1)};
  }

  void all_scales(AttentionProblem& p) const {
    p.q_scale = scales(options_.q_scale, "q_scale", q_, "q", packed_q());
    p.k_scale = scales(options_.k_scale, "k_scale", k_, "k", packed_k());
    p.v_scale = scales(options_.v_scale, "v_scale", v_, "v", packed_k());
  }

  const Check& check_;
  const AttentionOptions& options_;
  const TensorView &q_, &k_, &v_;
};

// Outputs that are written in the same call must be apart.
void apart(const Check& check, std::initializer_list<std::pair<const char*, const TensorView*>> outputs) {
  for (auto a = outputs.begin(); a != outputs.end(); ++a) {
    for (auto b = a + 1; b != outputs.end(); ++b) {
      const bool both = a->second->given() && b->second->given();
      check.require(!both || !may_share_memory(*a->second, *b->second), a->first, " and ", b->first,
                    " share memory: outputs must be apart; found ", a->first, " ", *a->second, ", ", b->first, " ",
                    *b->second);
    }
  }
}

}  // namespace

AttentionProblem checked_forward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& o, const TensorView& lse,
                                         const AttentionOptions& options) {
  AttentionProblem p;
  Builder builder(check, q, k, v, options);
  builder.build(p);
  if (o.given()) {
    p.o = builder.rows_like_q(p, o, "o", p.Dv);
    check.not_overlapping(o, "o");
  }
  if (lse.given()) {
    p.lse = builder.per_row(p, lse, "lse");
    check.not_overlapping(lse, "lse");
  }
  apart(check, {{"o", &o}, {"lse", &lse}});
  return p;
}

AttentionBackwardProblem checked_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                  const TensorView& v, const TensorView& o, const TensorView& lse,
                                                  const TensorView& d_o, const TensorView& d_lse,
                                                  const AttentionGradients& gradients,
                                                  const AttentionOptions& options) {
  AttentionBackwardProblem p;
  Builder builder(check, q, k, v, options);
  builder.build(p);
  check.require(k.dtype != DType::f8e4m3, "k is float8_e4m3fn, which has no backward");
  check.require(!p.draft_mask, "draft_mask has no backward: give the pairs as mask");
  check.require(!p.page_table, "page_table has no backward: gather the keys first");
  check.require(!p.cache_batch_idx, "cache_batch_idx has no backward: gather the keys first");
  check.require(!p.cache_leftpad, "cache_leftpad has no backward: gather the keys first");
  if (o.given()) p.o = builder.rows_like_q(p, o, "o", p.Dv);
  if (lse.given()) p.lse = builder.per_row(p, lse, "lse");
  if (d_o.given()) p.d_o = builder.rows_like_q(p, d_o, "d_o", p.Dv);
  if (d_lse.given()) p.d_lse = builder.per_row(p, d_lse, "d_lse");
  if (gradients.dq.given()) {
    p.dq = builder.rows_like_q(p, gradients.dq, "dq", p.D);
    check.not_overlapping(gradients.dq, "dq");
  }
  if (gradients.dk.given()) {
    p.dk = builder.like(gradients.dk, "dk", k, "k", builder.packed_k());
    check.not_overlapping(gradients.dk, "dk");
  }
  if (gradients.dv.given()) {
    p.dv = builder.like(gradients.dv, "dv", v, "v", builder.packed_k());
    check.not_overlapping(gradients.dv, "dv");
  }
  if (gradients.dbias.given()) {
    const TensorView &dbias = gradients.dbias, &bias = options.bias;
    check.require(bias.given(), "dbias is given but bias is not");
    check.require(dbias.dtype == bias.dtype, "dbias is ", name_of(dbias.dtype), ": it must have bias's dtype, ",
                  name_of(bias.dtype));
    p.dbias = builder.plane(p, dbias, "dbias");
    for (int i = 0; i < 4; ++i) {
      check.require(dbias.shape[i] == bias.shape[i], "dbias is ", dbias, ": it must have the shape of bias, ", bias);
    }
    check.not_overlapping(dbias, "dbias");
    p.bias_batch = bias.shape[0];
    p.bias_heads = bias.shape[1];
    p.bias_rows = bias.shape[2];
    p.bias_columns = bias.shape[3];
  }
  if (gradients.dsink.given()) {
    check.require(options.sink.given(), "dsink is given but sink is not");
    check.tensor(gradients.dsink, "dsink", DType::f32, q.device, 1);
    check.require(gradients.dsink.shape[0] == p.H, "dsink is ", gradients.dsink, ": it must have the shape of sink, [",
                  p.H, "]");
    check.not_overlapping(gradients.dsink, "dsink");
    p.dsink.data = static_cast<std::byte*>(gradients.dsink.data);
    p.dsink.stride_h = gradients.dsink.stride[0];
  }
  apart(check, {{"dq", &gradients.dq},
                {"dk", &gradients.dk},
                {"dv", &gradients.dv},
                {"dbias", &gradients.dbias},
                {"dsink", &gradients.dsink}});
  return p;
}

}  // namespace heddle

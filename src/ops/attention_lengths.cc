// How long sequences are and where their keys lie: packed, used up to a length, in rows or pages of a cache.
#include <algorithm>

#include "ops/attention_problem_builder.h"

namespace heddle {

const std::int32_t* ProblemBuilder::indices(const TensorView& view, const char* name, std::int64_t length) const {
  check_.tensor(view, name, DType::i32, q_.device, 1);
  check_.require(view.shape[0] == length, name, " has ", view.shape[0], " entries: it must have ", length);
  check_.require(view.stride[0] == 1 || view.shape[0] <= 1, name, " must be contiguous");
  return static_cast<const std::int32_t*>(view.data);
}

// Checks one cu_seqlens and returns its longest sequence.
std::int64_t ProblemBuilder::longest(const TensorView& cu, const char* name, std::int64_t total,
                                     const char* packed_name) const {
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

std::int64_t ProblemBuilder::packed_length(const TensorView& cu, const char* name, const TensorView& x,
                                           const char* x_name, std::int64_t bound, const char* bound_name) const {
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

void ProblemBuilder::lengths(AttentionProblem& p) const {
  const bool paged = options_.page_table.given();
  check_.require(!(paged && packed_k()), "page_table and cu_seqlens_k exclude each other: give the lengths as ",
                 names_.seqused_k);
  if (packed_q()) {
    p.Sq = packed_length(options_.cu_seqlens_q, "cu_seqlens_q", q_, "q", options_.max_seqlen_q, "max_seqlen_q");
    p.B = options_.cu_seqlens_q.shape[0] - 1;
    p.cu_seqlens_q = static_cast<const std::int32_t*>(options_.cu_seqlens_q.data);
  } else {
    p.B = q_.shape[0];
    p.Sq = q_.shape[1];
  }
  if (packed_k()) {
    p.Sk = packed_length(options_.cu_seqlens_k, "cu_seqlens_k", k_, names_.k, options_.max_seqlen_k, "max_seqlen_k");
    check_.require(options_.cu_seqlens_k.shape[0] == p.B + 1, "cu_seqlens_k has ", options_.cu_seqlens_k.shape[0],
                   " entries: for ", p.B, " sequences of q it must have ", p.B + 1);
    p.cu_seqlens_k = static_cast<const std::int32_t*>(options_.cu_seqlens_k.data);
  } else if (!paged) {
    p.Sk = k_.shape[1];
  }
}

void ProblemBuilder::cache(AttentionProblem& p) const {
  const TensorView& table = options_.page_table;
  if (table.given()) {
    check_.tensor(table, "page_table", DType::i32, q_.device, 2);
    check_.require(table.shape[0] == p.B, "page_table is ", table, ": it must have one row for each of ", p.B,
                   " sequences");
    check_.require(table.stride[1] == 1 || table.shape[1] <= 1, "page_table's rows must be contiguous");
    p.page_size = k_.shape[1];
    check_.require(p.page_size >= 1, names_.k, " has pages of 0 keys: page_size must be at least 1; found ", names_.k,
                   " ", k_);
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
    check_.require(k_.shape[0] == p.B, names_.k, " has ", k_.shape[0], " sequences and q has ", p.B,
                   ": they must be equal; found q ", q_, ", ", names_.k, " ", k_);
  }
  check_.require(p.B <= kMaxLength && p.H <= kMaxLength, "q has ", p.B, " sequences and ", p.H,
                 " heads: each must be below 2^31");
  check_.require(p.Sq <= kMaxLength && p.Sk <= kMaxLength, "sequences of ", p.Sq, " rows and ", p.Sk,
                 " keys: lengths must be below 2^31");
}

void ProblemBuilder::used(AttentionProblem& p) const {
  if (options_.seqused_q.given()) p.seqused_q = indices(options_.seqused_q, "seqused_q", p.B);
  if (options_.seqused_k.given()) p.seqused_k = indices(options_.seqused_k, names_.seqused_k, p.B);
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
      check_.require(p.seqused_k[b] >= 0 && p.seqused_k[b] <= keys, names_.seqused_k, "[", b, "] is ", p.seqused_k[b],
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

void ProblemBuilder::check_pages(const AttentionProblem& p, std::int64_t b, std::int64_t slots) const {
  const std::int64_t first = p.cache_leftpad ? p.cache_leftpad[b] / p.page_size : 0;
  for (std::int64_t page = first; page * p.page_size < slots; ++page) {
    const std::int32_t id = p.page_table[b * p.page_table_stride + page];
    check_.require(id >= 0 && id < k_.shape[0], "page_table[", b, ", ", page, "] is ", id, ": it must be from 0 to ",
                   k_.shape[0] - 1, " (", names_.k, " has ", k_.shape[0], " pages)");
  }
}

}  // namespace heddle

// How long sequences are and where their keys lie: packed, used up to a length, in rows or pages of a cache.
#include <algorithm>
#include <utility>

#include "ops/attention/problem_builder.h"
#include "ops/validate.h"

namespace heddle {

Indices ProblemBuilder::indices(const TensorView& view, const char* name, std::int64_t length) const {
  check_.tensor(view, name, DType::i32, q_.device, 1);
  check_.require(view.shape[0] == length, name, " has ", view.shape[0], " entries: it must have ", length);
  check_.require(view.stride[0] == 1 || view.shape[0] <= 1, name, " must be contiguous");
  check_.readable_indices(view, name);
  return {static_cast<const std::int32_t*>(view.data), true};
}

std::int64_t ProblemBuilder::packed_length(const TensorView& cu, IndexName name, const TensorView& x, IndexName x_name,
                                           std::int64_t bound, IndexName bound_name) const {
  check_.require(cu.rank == 1 && cu.shape[0] >= 1, name, " is ", cu, ": it must be int32 [B + 1]");
  check_.require(bound >= 0, bound_name, " is ", bound, ": it must be at least 0");
  const std::int32_t* at = indices(cu, name_of(name), cu.shape[0]).data;
  if (!readable()) {
    check_.require(bound > 0 || x.shape[0] == 0, bound_name, " is 0: ", name,
                   " is on a GPU, where lengths are not read, so an upper bound must be given");
    return std::min(bound, x.shape[0]);
  }
  const Offsets offsets{at, cu.shape[0] - 1, x.shape[0], bound, name, x_name, bound_name};
  FirstBadIndex found;
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n <= offsets.count; ++n) {
    check_offset(offsets, n, CheckStep::q_offsets, found);
    if (n > 0) longest = std::max<std::int64_t>(longest, std::int64_t{at[n]} - at[n - 1]);
  }
  require_none(check_, found);
  return bound == 0 ? longest : bound;
}

void ProblemBuilder::lengths(AttentionProblem& p) const {
  const bool paged = options_.page_table.given();
  check_.require(!(paged && packed_k()), "page_table and cu_seqlens_k exclude each other: give the lengths as ",
                 names_.seqused_k);
  if (packed_q()) {
    p.Sq = packed_length(options_.cu_seqlens_q, IndexName::cu_seqlens_q, q_, IndexName::q, options_.max_seqlen_q,
                         IndexName::max_seqlen_q);
    p.B = options_.cu_seqlens_q.shape[0] - 1;
    p.cu_seqlens_q = {static_cast<const std::int32_t*>(options_.cu_seqlens_q.data), true};
  } else {
    p.B = q_.shape[0];
    p.Sq = q_.shape[1];
  }
  if (packed_k()) {
    p.Sk = packed_length(options_.cu_seqlens_k, IndexName::cu_seqlens_k, k_, names_.k, options_.max_seqlen_k,
                         IndexName::max_seqlen_k);
    check_.require(options_.cu_seqlens_k.shape[0] == p.B + 1, "cu_seqlens_k has ", options_.cu_seqlens_k.shape[0],
                   " entries: for ", p.B, " sequences of q it must have ", p.B + 1);
    p.cu_seqlens_k = {static_cast<const std::int32_t*>(options_.cu_seqlens_k.data), true};
  } else if (!paged) {
    p.Sk = p.k_rows;
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
    check_.require(p.page_size >= 1, name_of(names_.k), " has pages of 0 keys: page_size must be at least 1; found ",
                   name_of(names_.k), " ", k_);
    check_.require(table.shape[1] <= kMaxLength / p.page_size, "page_table has ", table.shape[1], " pages of ",
                   p.page_size, " keys for a sequence: it must have fewer than 2^31 keys");
    p.Sk = table.shape[1] * p.page_size;
    check_.readable_indices(table, "page_table");
    p.page_table = {static_cast<const std::int32_t*>(table.data), true};
    p.page_table_stride = table.stride[0];
    check_.require(!options_.cache_batch_idx.given(), "cache_batch_idx and page_table exclude each other");
  } else if (options_.cache_batch_idx.given()) {
    check_.require(!packed_k(), "cache_batch_idx and cu_seqlens_k exclude each other");
    p.cache_batch_idx = indices(options_.cache_batch_idx, name_of(names_.rows), p.B);
    FirstBadIndex found;
    for (std::int64_t b = 0; readable() && b < p.B; ++b) check_cached_row(p, names_, b, found);
    require_none(check_, found);
  } else if (!packed_k()) {
    check_.require(k_.shape[0] == p.B, name_of(names_.k), " has ", k_.shape[0], " sequences and q has ", p.B,
                   ": they must be equal; found q ", q_, ", ", name_of(names_.k), " ", k_);
  }
  check_.require(p.B <= kMaxLength && p.H <= kMaxLength, "q has ", p.B, " sequences and ", p.H,
                 " heads: each must be below 2^31");
  check_.require(p.Sq <= kMaxLength && p.Sk <= kMaxLength, "sequences of ", p.Sq, " rows and ", p.Sk,
                 " keys: lengths must be below 2^31");
}

void ProblemBuilder::used(AttentionProblem& p) const {
  if (options_.seqused_q.given()) p.seqused_q = indices(options_.seqused_q, "seqused_q", p.B);
  if (options_.seqused_k.given()) p.seqused_k = indices(options_.seqused_k, name_of(names_.seqused_k), p.B);
  if (options_.cache_leftpad.given()) {
    check_.require(!packed_k(), "cache_leftpad and cu_seqlens_k exclude each other");
    p.cache_leftpad = indices(options_.cache_leftpad, "cache_leftpad", p.B);
  }
  FirstBadIndex found;
  for (std::int64_t b = 0; readable() && b < p.B; ++b) check_lengths(p, names_, b, {}, found);
  require_none(check_, found);
}

void ProblemBuilder::offsets(AttentionProblem& p) const {
  const bool rows = options_.q_offset.given(), keys = options_.key_offset.given();
  steps(p);
  if (!rows && !keys && !p.stepped()) return;
  const std::string why = rows ? "q_offset is given" : keys ? "key_offset is given" : step_text(p);
  check_.require(options_.causal != Causal::bottom_right, "causal is bottom_right and ", why,
                 ": a piece does not know where the longer problem's keys end; say top_left, whose diagonal is "
                 "where positions are equal");
  check_.require(!options_.draft_mask.given(), "draft_mask and ", rows ? "q_offset" : "key_offset",
                 " exclude each other: a draft's keys are the last of the whole problem");
  if (rows) p.q_offset = indices(options_.q_offset, "q_offset", p.B);
  if (keys) p.key_offset = indices(options_.key_offset, "key_offset", p.B);
  if (!rows && !keys) p.q_offset.given = true;
}

void ProblemBuilder::steps(AttentionProblem& p) const {
  for (const auto& [name, step] : {std::pair{"q_step", options_.q_step}, {"key_step", options_.key_step}}) {
    check_.require(step >= 1 && step <= kPositions, name, " is ", step, ": it must be from 1 to ", kPositions);
  }
  p.q_step = options_.q_step;
  p.key_step = options_.key_step;
  if (!p.stepped()) return;
  for (const auto& [name, given] : {std::pair{"alibi_slopes", options_.alibi_slopes.given()},
                                    {"bias", options_.bias.given()},
                                    {"mask", options_.mask.given()},
                                    {"draft_mask", options_.draft_mask.given()},
                                    {"dropout", options_.dropout.p > 0}}) {
    check_.require(!given, name, " is given and ", step_text(p),
                   ": what is said of single positions is not taken where rows or keys stand for several");
  }
}

std::string ProblemBuilder::step_text(const AttentionProblem& p) {
  return p.q_step > 1 ? text("q_step is ", p.q_step) : text("key_step is ", p.key_step);
}

void ProblemBuilder::positions(const AttentionProblem& p) const {
  FirstBadIndex found;
  for (std::int64_t b = 0; p.piece() && readable() && b < p.B; ++b) check_positions(p, b, found);
  require_none(check_, found);
}

}  // namespace heddle

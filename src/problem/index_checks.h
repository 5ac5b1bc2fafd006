// All checks of index data, over checked problems, for the host and for GPUs alike. They read nothing beyond the
// tensors, whatever these hold: what an earlier check finds may lead a later one astray, but not out of bounds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/attention.h"
#include "problem/index_rules.h"
#include "problem/int4_append.h"
#include "problem/kv_cache.h"

namespace heddle {

// What errors call arguments that not every operation, or not every language, names alike.
struct KeyNames {
  IndexName k = IndexName::k, v = IndexName::v, seqused_k = IndexName::seqused_k, rows = IndexName::cache_batch_idx;
};

// The order in which the host finds mistakes: step by step, and in each sequence by sequence.
enum class CheckStep : std::uint8_t {
  q_offsets,
  q_longest,
  k_offsets,
  k_longest,
  rows,
  lengths,
  positions,
  int4_pages,
  written_rows,
  written,
  rotary,
  clashes,
  q_rotary,
};

constexpr CheckPlace place_of(CheckStep step, std::int64_t b, std::int64_t part = 0, std::int64_t entry = 0) {
  return {{static_cast<std::int64_t>(step), b, part, entry}};
}

// The threads that share a sequence's entries of a page table; the host is one.
struct Lane {
  std::int64_t index = 0, count = 1;
};

constexpr BadIndex below(IndexRule rule, IndexName tensor, std::int64_t i, std::int64_t j, std::int64_t value,
                         std::int64_t limit, IndexName whose = IndexName::none) {
  if (value >= 0 && value < limit) return {};
  return {.rule = rule, .tensor = tensor, .whose = whose, .i = i, .j = j, .value = value, .limit = limit};
}

constexpr BadIndex length_within(IndexRule rule, IndexName tensor, std::int64_t b, std::int64_t value,
                                 std::int64_t limit) {
  if (value >= 0 && value <= limit) return {};
  return {.rule = rule, .tensor = tensor, .i = b, .value = value, .limit = limit};
}

// Positions first, first + step, ... of `count` rows of sequence b must lie below `limit`; count and step are below
// 2^31.
constexpr BadIndex positions_within(IndexName tensor, std::int64_t b, std::int64_t first, std::int64_t count,
                                    std::int64_t limit, IndexName whose, std::int64_t step = 1) {
  BadIndex bad{.tensor = tensor, .whose = whose, .i = b, .value = first, .other = count, .limit = limit, .step = step};
  if (first < 0) bad.rule = IndexRule::not_negative;
  if (first >= 0 && first + positions_of_rows(count, step) > limit) bad.rule = IndexRule::fits;
  return bad;
}

// Packed sequences: cu_seqlens [count + 1] over `rows` rows. bound: of a sequence's length; 0: none.
struct Offsets {
  const std::int32_t* at;
  std::int64_t count, rows, bound;
  IndexName name, rows_name, bound_name;
};

// Entry n of `offsets`, n from 0 to count.
constexpr void check_offset(const Offsets& offsets, std::int64_t n, CheckStep step, FirstBadIndex& found) {
  BadIndex bad{.tensor = offsets.name, .whose = offsets.rows_name, .i = n, .value = offsets.at[n]};
  if (n == 0 && bad.value != 0) {
    bad.rule = IndexRule::zero;
    found.note(place_of(step, 0), bad);
  }
  if (n > 0) {
    const std::int64_t before = offsets.at[n - 1], length = bad.value - before;
    BadIndex order = bad;
    order.other = before;
    if (length < 0) order.rule = IndexRule::ordered;
    found.note(place_of(step, n), order);
    const auto longest = static_cast<CheckStep>(static_cast<int>(step) + 1);
    if (offsets.bound > 0 && length > offsets.bound) {  // the longest of all comes first
      found.note(place_of(longest, -length), {.rule = IndexRule::longest,
                                              .tensor = offsets.name,
                                              .whose = offsets.bound_name,
                                              .value = length,
                                              .limit = offsets.bound});
    }
  }
  if (n == offsets.count && bad.value != offsets.rows) {
    bad.rule = IndexRule::total;
    bad.limit = offsets.rows;
    found.note(place_of(step, n + 1), bad);
  }
}

constexpr Offsets q_offsets(const AttentionProblem& p) {
  return {p.cu_seqlens_q.data, p.B, p.q_rows, p.Sq, IndexName::cu_seqlens_q, IndexName::q, IndexName::max_seqlen_q};
}
constexpr Offsets k_offsets(const AttentionProblem& p, const KeyNames& names) {
  return {p.cu_seqlens_k.data, p.B, p.k_rows, p.Sk, IndexName::cu_seqlens_k, names.k, IndexName::max_seqlen_k};
}

// The row of the cache that sequence b reads.
constexpr void check_cached_row(const AttentionProblem& p, const KeyNames& names, std::int64_t b,
                                FirstBadIndex& found) {
  if (p.cache_batch_idx.data == nullptr) return;
  found.note(place_of(CheckStep::rows, b),
             below(IndexRule::among, names.rows, b, -1, p.cache_batch_idx[b], p.k_batches));
}

// What is used of sequence b, and the pages of that.
constexpr void check_lengths(const AttentionProblem& p, const KeyNames& names, std::int64_t b, const Lane& lane,
                             FirstBadIndex& found) {
  const std::int64_t rows = p.cu_seqlens_q.data ? std::int64_t{p.cu_seqlens_q[b + 1]} - p.cu_seqlens_q[b] : p.Sq;
  const std::int64_t keys = p.cu_seqlens_k.data ? std::int64_t{p.cu_seqlens_k[b + 1]} - p.cu_seqlens_k[b] : p.Sk;
  const auto place = [&](int part, std::int64_t entry = 0) { return place_of(CheckStep::lengths, b, part, entry); };
  if (p.seqused_q.data)
    found.note(place(0), length_within(IndexRule::length, IndexName::seqused_q, b, p.seqused_q[b], rows));
  if (p.seqused_k.data)
    found.note(place(1), length_within(IndexRule::length, names.seqused_k, b, p.seqused_k[b], keys));
  const std::int64_t slots = p.seqused_k.data ? p.seqused_k[b] : keys;
  const std::int64_t skipped = p.cache_leftpad.data ? p.cache_leftpad[b] : 0;
  if (p.cache_leftpad.data) {
    found.note(place(2), length_within(IndexRule::used_length, IndexName::cache_leftpad, b, skipped, slots));
  }
  if (p.page_table.data == nullptr || p.int4) return;
  const std::int64_t end = clamped(slots, 0, keys), begin = clamped(skipped, 0, end);
  for (std::int64_t n = begin / p.page_size + lane.index; n * p.page_size < end; n += lane.count) {
    found.note(place(3, n), below(IndexRule::among_pages, IndexName::page_table, b, n,
                                  p.page_table[b * p.page_table_stride + n], p.k_batches, names.k));
  }
}

// Where sequence b's rows and keys stand in the longer problem that the call is a piece of.
constexpr void check_positions(const AttentionProblem& p, std::int64_t b, FirstBadIndex& found) {
  if (!p.piece()) return;
  const Sequence s = p.sequence(b);
  found.note(place_of(CheckStep::positions, b, 0),
             positions_within(IndexName::q_offset, b, p.q_offset.data ? p.q_offset[b] : 0, s.sq, kPositions,
                              IndexName::positions_number, p.q_step));
  found.note(place_of(CheckStep::positions, b, 1),
             positions_within(IndexName::key_offset, b, p.key_offset.data ? p.key_offset[b] : 0, s.sk,
                              p.columns >= 0 ? p.columns : kPositions,
                              p.columns >= 0 ? IndexName::columns_number : IndexName::positions_number, p.key_step));
}

// The pages of sequence b that hold its keys in 4 bits.
constexpr void check_int4_pages(const AttentionProblem& p, std::int64_t b, const Lane& lane, FirstBadIndex& found) {
  if (p.page_table.data == nullptr || !p.int4) return;
  const std::int64_t end = int4_blocks(clamped(p.seqused_k[b], 0, p.Sk));
  for (std::int64_t n = lane.index; n < end; n += lane.count) {
    found.note(
        place_of(CheckStep::int4_pages, b, 0, n),
        below(IndexRule::among, IndexName::page_table, b, n, p.page_table[b * p.page_table_stride + n], p.int4.pages));
  }
}

// Where sequence b's new rows go.
constexpr void check_written(const AppendProblem& p, IndexName seqlens, std::int64_t b, const Lane& lane,
                             FirstBadIndex& found) {
  if (p.cache_batch_idx != nullptr) {
    found.note(place_of(CheckStep::written_rows, b), below(IndexRule::among_rows, IndexName::cache_batch_idx, b, -1,
                                                           p.cache_batch_idx[b], p.pages, IndexName::k_cache));
  }
  const bool paged = p.page_table != nullptr;
  const std::int64_t first = p.seqlens[b];
  found.note(place_of(CheckStep::written, b), positions_within(seqlens, b, first, p.S, p.capacity,
                                                               paged ? IndexName::pages_hold : IndexName::rows_hold));
  if (p.rotary.dims > 0) {
    found.note(place_of(CheckStep::rotary, b),
               positions_within(seqlens, b, first, p.S, p.rotary.positions, IndexName::tables_number));
  }
  const std::int64_t begin = clamped(first, 0, p.capacity), end = clamped(first + p.S, begin, p.capacity);
  if (!paged || begin == end) return;
  for (std::int64_t n = begin / p.page_size + lane.index; n * p.page_size < end; n += lane.count) {
    found.note(place_of(CheckStep::written, b, 1, n),
               below(IndexRule::among_pages, IndexName::page_table, b, n, p.page_table[b * p.page_table_stride + n],
                     p.pages, IndexName::k_cache));
  }
}

constexpr void check_written(const Int4AppendProblem& p, IndexName seqlens, std::int64_t b, const Lane& lane,
                             FirstBadIndex& found) {
  const auto place = [&](int part, std::int64_t entry = 0) { return place_of(CheckStep::written, b, part, entry); };
  const std::int64_t first = p.seqlens[b];
  found.note(place(0), below(IndexRule::among, IndexName::row_idx, b, -1, p.row(b), p.rows));
  found.note(place(1), positions_within(seqlens, b, first, p.S, p.capacity, IndexName::sequences_hold));
  if (p.rotary.dims > 0) {
    found.note(place(2), positions_within(seqlens, b, first, p.S, p.rotary.positions, IndexName::tables_number));
  }
  if (p.page_table == nullptr) return;
  const std::int64_t begin = clamped(first, 0, p.capacity), end = int4_blocks(clamped(first + p.S, begin, p.capacity));
  for (std::int64_t n = int4_blocks(begin) + lane.index; n < end; n += lane.count) {
    found.note(place(3, n), below(IndexRule::among, IndexName::page_table, b, n, p.page(b, n), p.blocks.pages));
  }
}

// Where sequence b's rows stand.
constexpr void check_rotated(const RotaryProblem& p, IndexName offsets, std::int64_t b, CheckStep step,
                             FirstBadIndex& found) {
  found.note(place_of(step, b), positions_within(offsets, b, p.offsets != nullptr ? p.offsets[b] : 0, p.S,
                                                 p.rotary.positions, IndexName::tables_number));
}

}  // namespace heddle

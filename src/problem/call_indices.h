// The index data of one call, as the kernel that checks it on a GPU gets it (cuda/validate.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/index_checks.h"
#include "problem/index_clashes.h"
#include "problem/pool.h"

namespace heddle {

// Each has its sequences(), the check() of entry n from 0 to sequences() of what it has for each of them, and clashes:
// pieces of new rows that must not meet.

struct AttentionIndices {
  AttentionProblem p;
  KeyNames names;

  constexpr std::int64_t sequences() const { return p.B; }
  constexpr void check(std::int64_t n, const Lane& lane, FirstBadIndex& found) const {
    if (p.cu_seqlens_q.data) check_offset(q_offsets(p), n, CheckStep::q_offsets, found);
    if (p.cu_seqlens_k.data) check_offset(k_offsets(p, names), n, CheckStep::k_offsets, found);
    if (n == p.B) return;
    check_cached_row(p, names, n, found);
    check_lengths(p, names, n, lane, found);
    if (lane.index == 0) check_positions(p, n, found);
    check_int4_pages(p, n, lane, found);
  }
  constexpr std::int64_t pieces() const { return 0; }
  constexpr void check_piece(std::int64_t, FirstBadIndex&) const {}
};

template <class Problem>  // AppendProblem, Int4AppendProblem
struct WrittenIndices {
  Problem p;
  IndexName seqlens;

  constexpr std::int64_t sequences() const { return p.B; }
  constexpr void check(std::int64_t n, const Lane& lane, FirstBadIndex& found) const {
    if (n < p.B) check_written(p, seqlens, n, lane, found);
  }
  constexpr std::int64_t pieces() const { return p.B * pieces_of_sequence(p); }
  constexpr void check_piece(std::int64_t mine, FirstBadIndex& found) const { check_clashes(p, mine, found); }
};
using AppendIndices = WrittenIndices<AppendProblem>;
using Int4AppendIndices = WrittenIndices<Int4AppendProblem>;

struct RotaryIndices {
  RotaryProblem p;
  IndexName offsets;
  CheckStep step = CheckStep::rotary;

  constexpr std::int64_t sequences() const { return p.B; }
  constexpr void check(std::int64_t n, const Lane&, FirstBadIndex& found) const {
    if (n < p.B) check_rotated(p, offsets, n, step, found);
  }
  constexpr std::int64_t pieces() const { return 0; }
  constexpr void check_piece(std::int64_t, FirstBadIndex&) const {}
};

// attention_with_kv_cache: q's rows are rotated too, if any are (`rotary.p.B` is 0 otherwise).
struct CachedIndices {
  AttentionIndices attention;
  AppendIndices append;
  RotaryIndices rotary;

  constexpr std::int64_t sequences() const { return attention.sequences(); }
  constexpr void check(std::int64_t n, const Lane& lane, FirstBadIndex& found) const {
    attention.check(n, lane, found);
    append.check(n, lane, found);
    rotary.check(n, lane, found);
  }
  constexpr std::int64_t pieces() const { return append.pieces(); }
  constexpr void check_piece(std::int64_t mine, FirstBadIndex& found) const { append.check_piece(mine, found); }
};

struct OffsetIndices {
  Offsets offsets;

  constexpr std::int64_t sequences() const { return offsets.count; }
  constexpr void check(std::int64_t n, const Lane&, FirstBadIndex& found) const {
    check_offset(offsets, n, CheckStep::q_offsets, found);
  }
  constexpr std::int64_t pieces() const { return 0; }
  constexpr void check_piece(std::int64_t, FirstBadIndex&) const {}
};

struct PoolIndices {
  PoolProblem p;

  constexpr std::int64_t sequences() const { return p.B; }
  constexpr void check(std::int64_t n, const Lane& lane, FirstBadIndex& found) const {
    const Offsets offsets{p.cu_seqlens.data, p.B, p.S, 0, IndexName::cu_seqlens, IndexName::x, IndexName::none};
    if (p.cu_seqlens.data) check_offset(offsets, n, CheckStep::q_offsets, found);
    if (n == p.B || p.seqused.data == nullptr) return;
    const std::int64_t keys = p.cu_seqlens.data ? std::int64_t{p.cu_seqlens[n + 1]} - p.cu_seqlens[n] : p.S;
    found.note(place_of(CheckStep::lengths, n),
               length_within(IndexRule::length, IndexName::seqused, n, p.seqused[n], keys));
    if (p.page_table.data == nullptr) return;
    const PoolProblem::Sequence s = p.sequence(n);
    const std::int64_t end = s.pooled > s.before ? (s.pooled - 1) * p.stride + p.block : 0;  // of what is read
    for (std::int64_t page = s.before * p.stride / p.page_size + lane.index; page * p.page_size < end;
         page += lane.count) {
      found.note(place_of(CheckStep::lengths, n, 1, page),
                 below(IndexRule::among_pages, IndexName::page_table, n, page,
                       p.page_table[n * p.page_table_stride + page], p.pages, IndexName::x));
    }
  }
  constexpr std::int64_t pieces() const { return 0; }
  constexpr void check_piece(std::int64_t, FirstBadIndex&) const {}
};

// What thread `thread` of `warps` * `lanes` checks: its warp takes one sequence after another.
template <class Indices>
constexpr FirstBadIndex check_share(const Indices& indices, std::int64_t thread, std::int64_t warps,
                                    std::int64_t lanes) {
  FirstBadIndex found;
  for (std::int64_t n = thread / lanes; n <= indices.sequences(); n += warps) {
    indices.check(n, {.index = thread % lanes, .count = lanes}, found);
  }
  return found;
}

// Whether pieces may be read, and matter, after all shares were checked.
constexpr bool pieces_come_first(const FirstBadIndex& found) {
  return !found || place_of(CheckStep::clashes, 0) < found.place;
}

template <class Indices>
constexpr FirstBadIndex check_pieces(const Indices& indices, std::int64_t thread, std::int64_t threads) {
  FirstBadIndex found;
  for (std::int64_t n = thread; n < indices.pieces(); n += threads) indices.check_piece(n, found);
  return found;
}

}  // namespace heddle

// Two rows of one append must not go to one place: which of them stays would depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/index_checks.h"

namespace heddle {

// Slots [begin, end) of one page, written by rows of sequence b from position `first` on. Of a cache in 4 bits, all of
// a page, or of a sequence's row, whose kind comes first.
struct Piece {
  std::int64_t kind = 0, page = 0, begin = 0, end = 0, b = 0, first = 0;

  constexpr bool empty() const { return begin >= end; }
  constexpr CheckPlace place() const {
    return {{static_cast<std::int64_t>(CheckStep::clashes), kind, page, begin, b, first}};
  }
  friend constexpr bool operator<(const Piece& x, const Piece& y) { return x.place() < y.place(); }
  constexpr bool meets(const Piece& y) const {
    return kind == y.kind && page == y.page && begin < y.end && y.begin < end;
  }
};

// Pieces are numbered, some of them empty. They are read where the other checks have found nothing.
constexpr std::int64_t pieces_of_sequence(const AppendProblem& p) {
  return p.S == 0 ? 0 : (p.S + p.page_size - 2) / p.page_size + 1;
}
constexpr Piece piece(const AppendProblem& p, std::int64_t b, std::int64_t n) {
  const std::int64_t first = p.seqlens[b], page = first / p.page_size + n;
  const std::int64_t begin = n == 0 ? first : page * p.page_size;
  const std::int64_t end = clamped((page + 1) * p.page_size, 0, first + p.S);
  if (begin >= end) return {};
  const std::int64_t slot = begin % p.page_size;
  return {.page = p.page(b, begin), .begin = slot, .end = slot + end - begin, .b = b, .first = begin};
}
constexpr BadIndex clash(const AppendProblem& p, const Piece& x, const Piece& y) {
  return {.rule = IndexRule::own_slot,
          .whose = p.page_table != nullptr ? IndexName::page : IndexName::cache_row,
          .i = x.b,
          .j = y.b,
          .value = x.first + y.begin - x.begin,
          .other = y.first,
          .limit = y.page,
          .slot = y.begin};
}

constexpr std::int64_t pieces_of_sequence(const Int4AppendProblem& p) {
  if (p.S == 0) return 0;
  return p.page_table == nullptr ? 1 : 2 + p.S / kInt4Keys;  // the row, and pages
}
constexpr Piece piece(const Int4AppendProblem& p, std::int64_t b, std::int64_t n) {
  if (n == 0) return {.page = p.row(b), .end = 1, .b = b};
  const std::int64_t block = int4_blocks(p.seqlens[b]) + n - 1;
  if (block >= int4_blocks(p.seqlens[b] + p.S)) return {};
  return {.kind = 1, .page = p.page(b, block), .end = 1, .b = b, .first = block};
}
constexpr BadIndex clash(const Int4AppendProblem&, const Piece& x, const Piece& y) {
  return {.rule = x.kind == 0 ? IndexRule::own_row : IndexRule::own_page, .i = x.b, .j = y.b, .limit = y.page};
}

// Piece `mine` of all sequences' against the others. What is noted first is what neighbours in order show: before it
// no two pieces meet, so only one of them meets it. On a GPU, where nothing sorts them, the time of all grows with
// their square: what that costs only validate mode pays.
template <class Problem>
constexpr void check_clashes(const Problem& p, std::int64_t mine, FirstBadIndex& found) {
  const std::int64_t each = pieces_of_sequence(p);
  const Piece y = piece(p, mine / each, mine % each);
  if (y.empty()) return;
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t n = 0; n < each; ++n) {
      const Piece x = piece(p, b, n);
      if (!x.empty() && x.meets(y) && x < y) found.note(y.place(), clash(p, x, y));
    }
  }
}

}  // namespace heddle

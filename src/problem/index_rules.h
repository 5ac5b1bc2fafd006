// What index data (offsets, lengths, rows, pages, positions) must be, and the sentence that says so: one and the same
// for the host, which looks before a call, and for GPUs, where a kernel looks in validate mode (cuda/validate.h).
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace heddle {

enum class IndexRule : std::uint8_t {
  kept,         // nothing is broken
  zero,         // offsets begin with 0
  ordered,      // they never decrease
  total,        // they end at the number of rows
  longest,      // no sequence is longer than the bound
  length,       // a length from 0 to the sequence's
  used_length,  // and to what is used of it
  among,        // a number below `limit`
  among_rows,   // of the rows, or pages, that a tensor has
  among_pages,
  not_negative,  // a position
  fits,          // positions end by `limit`
  own_slot,      // two rows of a call go to two slots
  own_row,       // two sequences write to two rows, or pages
  own_page,
};

// Arguments, and what limits them, as sentences name them. Numbers: a literal in code of a GPU has no address that the
// host could read.
enum class IndexName : std::uint8_t {
  none,
  q,
  k,
  v,
  x,
  k_cache,
  v_cache,
  k_tail,
  v_tail,
  cu_seqlens_q,
  cu_seqlens_k,
  cu_seqlens,
  max_seqlen_q,
  max_seqlen_k,
  longest,
  seqused_q,
  seqused_k,
  seqlens,
  offsets,
  cache_leftpad,
  page_table,
  cache_batch_idx,
  row_idx,
  page,
  cache_row,
  pages_hold,
  rows_hold,
  sequences_hold,
  tables_number,
  q_offset,
  key_offset,
  columns_number,
  positions_number,
  k_pooled,
  seqused,
  lengths,
};
const char* name_of(IndexName name);
void append(std::string& out, IndexName name);

// Index data that breaks a rule: plain data, so that a kernel can hand it over.
struct BadIndex {
  IndexRule rule = IndexRule::kept;
  IndexName tensor = IndexName::none;  // that holds it
  IndexName whose = IndexName::none;   // what `limit` belongs to
  std::int64_t i = 0, j = -1;          // where: tensor[i], or page_table[i, j]; where two clash, their sequences
  std::int64_t value = 0, other = 0;   // what is there; where two positions clash, both
  std::int64_t limit = 0;              // where two clash, the row or page
  std::int64_t step = 1;               // of positions, from a row to the next
  std::int64_t slot = 0;

  constexpr explicit operator bool() const { return rule != IndexRule::kept; }
};

// From the first to the last of so many rows, which stand `step` apart.
constexpr std::int64_t positions_of_rows(std::int64_t count, std::int64_t step) {
  return count > 0 ? (count - 1) * step + 1 : 0;
}

// "page_table[1, 1] is 6: it must be from 0 to 5 (k has 6 pages)"
std::string sentence(const BadIndex& bad);

// Where in a call's checks a rule was broken. The host throws what comes first, and GPUs report that.
struct CheckPlace {
  std::int64_t at[6] = {};

  friend constexpr bool operator<(const CheckPlace& x, const CheckPlace& y) {
    for (int n = 0; n < 6; ++n) {
      if (x.at[n] != y.at[n]) return x.at[n] < y.at[n];
    }
    return false;
  }
};

// What comes first of all that was noted.
struct FirstBadIndex {
  CheckPlace place = {{std::numeric_limits<std::int64_t>::max()}};
  BadIndex bad;

  constexpr void note(const CheckPlace& where, const BadIndex& found) {
    if (found && where < place) place = where, bad = found;
  }
  constexpr explicit operator bool() const { return static_cast<bool>(bad); }
};

}  // namespace heddle

// What a launch tells the kernels, and how the rows lie that they write: for every backward kernel that reads them.
#pragma once

#include <vector_types.h>

#include "core/attention_problem.h"

namespace heddle::cuda::any::attention_bwd_rows {

// Rows are stored head by head, [H][rows_per_head]; a sequence's begin at a multiple of kRowTile, and what is stored of
// it goes on to the next: tiles of up to kRowTile rows can be copied whole, in pieces of 16 bytes.
constexpr std::int64_t kRowTile = 128;

constexpr std::int64_t round_up_to_tile(std::int64_t rows) { return (rows + kRowTile - 1) / kRowTile * kRowTile; }

// Without reading index data.
constexpr std::int64_t rows_per_head(const AttentionProblem& p) {
  return p.cu_seqlens_q ? round_up_to_tile(p.q_rows + kRowTile * p.B) : p.B * round_up_to_tile(p.Sq);
}

// Of sequence b in a head.
constexpr std::int64_t first_row(const AttentionProblem& p, std::int64_t b, const Sequence& s) {
  return p.cu_seqlens_q ? (s.q_begin + kRowTile * b) / kRowTile * kRowTile : b * round_up_to_tile(p.Sq);
}

// Where the results go. A row that attends no key, by lengths or by its lse, has lse_log2 = +inf: so P = exp2(s -
// lse_log2) is 0. What lies in q, dO and O of such a row is not read here and may be anything.
struct Rows {
  float* lse_log2;  // lse * log2(e)
  float* delta;     // sum over d of dO * O, less d_lse; 0 for rows without keys
  uint4* sums;      // cleared: words_per_row words of 16 bytes for each row. May be null
  std::int64_t words_per_row;
};

struct Params {
  AttentionBackwardProblem problem;
  Rows rows;
  std::int64_t blocks_per_sequence;
  bool in_pieces;  // rows of o and d_o may be read in pieces of 16 bytes
};

}  // namespace heddle::cuda::any::attention_bwd_rows

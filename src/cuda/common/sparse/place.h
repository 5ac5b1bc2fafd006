// Where tiles of neighbouring rows are, whose sequences may be packed.
#pragma once

#include <cstdint>

#include "problem/attention.h"

namespace heddle::cuda::sparse {

// Of a tile: its sequence, and its first row there.
struct Place {
  std::int64_t b = 0, row = 0;
  Sequence s;
  bool there = false;  // it has rows that are stored
};

// Of tile n, where the rows of each sequence are cut into tiles of `share`.
constexpr Place place_of_tile(const AttentionProblem& p, std::int64_t n, std::int64_t share) {
  Place at;
  if (!p.cu_seqlens_q.given) {
    const std::int64_t of_sequence = (p.Sq + share - 1) / share;
    at.b = n / of_sequence;
    at.row = (n - at.b * of_sequence) * share;
  } else {
    const auto first = [&](std::int64_t b) {
      const std::int64_t begin = clamped(p.cu_seqlens_q[b], 0, p.q_rows);
      return share == 1 ? begin : begin / share + b;
    };
    std::int64_t low = 0, high = p.B;  // low begins there or before, high does not
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (first(middle) <= n ? low : high) = middle;
    }
    at.b = low;
    at.row = (n - first(low)) * share;
  }
  at.s = p.sequence(at.b);
  at.there = at.row >= 0 && at.row < at.s.q_rows;
  return at;
}

// How many there are; of packed sequences, how many there could be.
constexpr std::int64_t tiles_of_rows(const AttentionProblem& p, std::int64_t share) {
  if (!p.cu_seqlens_q.given) return p.B * ((p.Sq + share - 1) / share);
  return share == 1 ? p.q_rows : p.q_rows / share + p.B;
}

}  // namespace heddle::cuda::sparse

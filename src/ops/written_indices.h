// The host's checks of where an append's rows go.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory_resource>
#include <vector>

#include "ops/validate.h"
#include "problem/index_clashes.h"

namespace heddle {

// p: AppendProblem or Int4AppendProblem, its index data readable. seqlens: what errors call the lengths.
template <class Problem>
void check_written_indices(const Check& check, const Problem& p, IndexName seqlens) {
  FirstBadIndex found;
  for (std::int64_t b = 0; b < p.B; ++b) check_written(p, seqlens, b, {}, found);
  require_none(check, found);

  // Decoding writes a piece per sequence; this much of the stack serves a batch of 300 without the heap.
  std::array<std::byte, 16 << 10> stack;
  std::pmr::monotonic_buffer_resource memory(stack.data(), stack.size());
  std::pmr::vector<Piece> pieces(&memory);
  const std::int64_t each = pieces_of_sequence(p);
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t n = 0; n < each; ++n) count += piece(p, b, n).empty() ? 0 : 1;
  }
  pieces.reserve(static_cast<std::size_t>(count));
  for (std::int64_t b = 0; b < p.B; ++b) {
    for (std::int64_t n = 0; n < each; ++n) {
      if (const Piece one = piece(p, b, n); !one.empty()) pieces.push_back(one);
    }
  }
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i - 1].meets(pieces[i])) check.require(false, sentence(clash(p, pieces[i - 1], pieces[i])));
  }
}

}  // namespace heddle

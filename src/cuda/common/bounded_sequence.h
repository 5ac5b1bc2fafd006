// Sequences no longer than was said, where memory is for as many rows and keys as that.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda {

// AttentionProblem::stored_sequence(), cut off at the bounds Sq and Sk if there is a bias or mask, whose extents they
// are, or if `buffers` in memory have these extents too. Where nothing has them, a sequence that is longer than was
// said costs nothing but time.
constexpr Sequence bounded_sequence(const AttentionProblem& p, std::int64_t b, bool buffers = false) {
  Sequence s = p.stored_sequence(b);
  if (buffers || p.bias.data != nullptr || p.mask.data != nullptr) {
    s.q_rows = clamped(s.q_rows, 0, p.Sq);
    s.k_rows = clamped(s.k_rows, 0, p.Sk);
    s.sq = clamped(s.sq, 0, p.Sq);
    s.sk = clamped(s.sk, 0, p.Sk);
  }
  return s;
}

// The same with its positions, for kernels that serve pieces. Columns of a bias or mask are the longer problem's, and
// no key stands behind them.
constexpr Sequence bounded_piece(const AttentionProblem& p, std::int64_t b, bool buffers = false) {
  Sequence s = bounded_sequence(p, b, buffers);
  if (!p.piece()) return s;
  s.q_offset = p.q_offset.data != nullptr ? clamped(p.q_offset[b], 0, kPositions) : 0;
  s.key_offset = p.key_offset.data != nullptr ? clamped(p.key_offset[b], 0, kPositions) : 0;
  if (p.columns >= 0) {
    s.sk = clamped(s.sk, 0, p.columns);
    s.key_offset = clamped(s.key_offset, 0, p.columns - s.sk);
  }
  s.off = s.q_offset - s.key_offset;
  return s;
}

}  // namespace heddle::cuda

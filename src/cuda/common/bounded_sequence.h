// Sequences no longer than was said, where memory is for as many rows and keys as that.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda {

// A sequence of the problem, cut off at the bounds Sq and Sk if there is a bias or mask, whose extents they are, or if
// `buffers` in memory have these extents too. Where nothing has them, a sequence that is longer than was said costs
// nothing but time.
constexpr Sequence bounded(const AttentionProblem& p, Sequence s, bool buffers) {
  if (buffers || p.bias.data != nullptr || p.mask.data != nullptr) {
    s.q_rows = clamped(s.q_rows, 0, p.Sq);
    s.k_rows = clamped(s.k_rows, 0, p.Sk);
    s.sq = clamped(s.sq, 0, p.Sq);
    s.sk = clamped(s.sk, 0, p.Sk);
  }
  return s;
}

// Without positions in a longer problem.
constexpr Sequence bounded_sequence(const AttentionProblem& p, std::int64_t b, bool buffers = false) {
  return bounded(p, p.stored_sequence(b), buffers);
}

}  // namespace heddle::cuda

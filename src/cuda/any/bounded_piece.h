// Sequences with their positions in the longer problem that a call is a piece of, for kernels that serve pieces.
#pragma once

#include "cuda/common/bounded_sequence.h"

namespace heddle::cuda::any {

// Columns of a bias or mask are the longer problem's, and no key stands behind them.
constexpr Sequence bounded_piece(const AttentionProblem& p, std::int64_t b, bool buffers = false) {
  Sequence s = bounded(p, p.sequence(b), buffers);
  if (p.piece() && p.columns >= 0) {
    s.sk = clamped(s.sk, 0, p.columns);
    s.key_offset = clamped(s.key_offset, 0, p.columns - s.sk);
    s.off = s.q_offset - s.key_offset;
  }
  return s;
}

}  // namespace heddle::cuda::any

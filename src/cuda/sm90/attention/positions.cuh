// Where rows and keys of a piece of a longer problem stand to each other.
#pragma once

#include "cuda/common/attention/window.h"
#include "cuda/sm90/attention/params.h"
#include "problem/band.h"

namespace heddle::cuda::sm90::attention {

// Of row 0 from key 0 of sequence s, within +-kOpen / 2: sequences and windows are so short (refuse_positions()) that
// farther apart no pair changes sides.
__device__ inline int piece_off(const Positions& piece, int s) {
  const int row = piece.q_offset != nullptr ? max(piece.q_offset[s], 0) : 0;
  const int key = piece.key_offset != nullptr ? max(piece.key_offset[s], 0) : 0;
  return min(max(row - key, -kOpen / 2), kOpen / 2);
}

// BasicBand for such rows and keys, its division by a Divisor.
struct PieceBand {
  const Params& p;
  int off;

  // The keys from 0 on that row i meets, if there were keys without end. An end of 0 or less: none.
  __device__ Interval<int> reach(int i) const {
    const Divisor& step = p.piece.key_step;
    const int at = off + p.piece.row_step * i, last = at + p.right;
    const int first = at - p.left + (static_cast<int>(step.divisor) - 1);
    return {step.quotient(max(first, 0)), last < 0 ? 0 : step.quotient(last) + 1};
  }
};

// What says by reach(i) which keys a row meets.
template <class C>
__device__ auto band_of(const Params& p, int off) {
  if constexpr (C::kIsPiece) {
    return PieceBand{p, off};
  } else {
    return BasicBand<int>{.off = off, .left = p.left, .right = p.right};
  }
}

}  // namespace heddle::cuda::sm90::attention

// The keys that a row of few meets by causality and window. For host and device.
#pragma once

#include "cuda/common/attention/window.h"
#include "cuda/common/divisor.h"
#include "problem/attention.h"

namespace heddle::cuda {

// BasicBand, its division by a Divisor. `off`, where row 0 stands from key 0, lies within +-kOpen / 2, and sequences
// and windows of pieces are no longer than kOpen / 4 positions (refuse_piece_of_few_rows()), so that no sum overflows.
struct RowBand {
  int left = 0, right = 0, row_step = 1;
  Divisor key_step;

  RowBand() = default;
  explicit RowBand(const AttentionProblem& p)
      : left(window_of(p).left),
        right(window_of(p).right),
        row_step(static_cast<int>(p.q_step)),
        key_step(static_cast<unsigned>(p.key_step)) {}

  // The first key that row i meets, and the one behind the last, if there were keys from 0 on without end.
  constexpr int begin(int off, int i) const {
    return key_step.quotient(from_0(off + row_step * i - left + static_cast<int>(key_step.divisor) - 1));
  }
  constexpr int end(int off, int i) const {
    return key_step.quotient(from_0(off + row_step * i + right + static_cast<int>(key_step.divisor)));
  }

 private:
  static constexpr int from_0(int x) { return x < 0 ? 0 : x; }
};

// `off` of a sequence as RowBand takes it: farther apart no pair changes sides.
constexpr int row_band_off(const Sequence& s) { return static_cast<int>(clamped(s.off, -kOpen / 2, kOpen / 2)); }

// What kernels with a RowBand do not serve of a piece.
Refusal refuse_piece_of_few_rows(const AttentionProblem& p);

}  // namespace heddle::cuda

// Query rows that are stored beyond seqused_q. No tile has any of them, or its other rows' bits would follow from how
// many there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "problem/attention.h"

namespace heddle::cpu {

// x: an operand with q's rows, `width` columns. Those of sequence b that are not used become zeros.
inline void zero_unused_rows(const AttentionProblem& p, std::int64_t b, const Operand& x, std::int64_t width) {
  const Sequence s = p.sequence(b);
  const auto size = static_cast<std::int64_t>(size_of(x.dtype)), step = x.stride_d * size;
  for (std::int64_t i = s.sq; i < s.q_rows; ++i) {
    for (std::int64_t h = 0; h < p.H; ++h) {
      std::byte* row = x.at(b, s.q_begin + i, h);
      // Zeros in any dtype.
      if (step == size) {
        std::memset(row, 0, static_cast<std::size_t>(width * size));
      } else {
        for (std::int64_t d = 0; d < width; ++d) std::memset(row + d * step, 0, static_cast<std::size_t>(size));
      }
    }
  }
}

}  // namespace heddle::cpu

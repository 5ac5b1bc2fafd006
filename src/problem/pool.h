// Pooling of keys after its arguments were checked (include/heddle/nsa.h).
#pragma once

#include <cstdint>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

struct PoolProblem {
  std::int64_t B = 0, H = 0, D = 0;
  std::int64_t S = 0, N = 0;  // extents of the row dimensions of x and pooled: of a sequence, or all if packed
  std::int64_t block = 1, stride = 1;
  Device device = Device::cpu;
  Operand x, pooled;  // the backward's dx and d_pooled
  Indices cu_seqlens, seqused;

  constexpr bool packed() const { return cu_seqlens.given; }
  // Of rows that are batched, or all of one batch if packed.
  constexpr std::int64_t batches() const { return packed() ? 1 : B; }

  // One sequence in x and pooled: first rows, keys that are used, pooled rows that it has.
  struct Sequence {
    std::int64_t x_begin = 0, pooled_begin = 0, keys = 0, pooled = 0;
  };
  // Clamped, so that no row outside the tensors is named.
  constexpr Sequence sequence(std::int64_t b) const {
    Sequence s{.keys = S};
    if (cu_seqlens.data) {
      s.x_begin = clamped(cu_seqlens[b], 0, S);
      s.keys = clamped(cu_seqlens[b + 1], s.x_begin, S) - s.x_begin;
      s.pooled_begin = s.x_begin / stride;
    }
    if (seqused.data) s.keys = clamped(seqused[b], 0, s.keys);
    s.pooled = s.keys < block ? 0 : (s.keys - block) / stride + 1;
    return s;
  }

  // Of packed data: the last sequence that begins at `row` or before, of x's rows or of pooled's.
  constexpr std::int64_t sequence_of(std::int64_t row, bool of_pooled) const {
    std::int64_t low = 0, high = B;  // low begins there or before, high does not
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      const Sequence s = sequence(middle);
      ((of_pooled ? s.pooled_begin : s.x_begin) <= row ? low : high) = middle;
    }
    return low;
  }

  // Bytes that a call reads and writes at least.
  double bytes() const {
    return static_cast<double>(batches() * (S + N) * H * D) * static_cast<double>(size_of(x.dtype));
  }
};

struct PoolBackwardProblem : PoolProblem {};

using PoolKernel = Kernel<PoolProblem>;
using PoolBackwardKernel = Kernel<PoolBackwardProblem>;

}  // namespace heddle

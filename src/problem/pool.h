// Pooling of keys after its arguments were checked (include/heddle/nsa.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

struct PoolProblem {
  std::int64_t B = 0, H = 0, D = 0;
  std::int64_t S = 0, N = 0;  // extents of the row dimensions of x and pooled: of a sequence, or all if packed
  std::int64_t block = 1, stride = 1;
  std::int64_t appended = 0;  // the last keys of each sequence, whose blocks' rows alone are written; 0: all rows
  Device device = Device::cpu;
  Operand x, pooled;  // the backward's dx and d_pooled
  Indices cu_seqlens, seqused;
  // Of a cache in pages, [B, ...]: x and pooled are then [page, row of it, head, dim], and S and N count the rows of
  // all pages of a sequence.
  Indices page_table;
  std::int64_t page_table_stride = 0, pages = 0;
  std::int64_t page_size = 0;  // rows of x in a page; of pooled: pooled_page_size()

  constexpr std::int64_t pooled_page_size() const { return page_size / stride; }

  // Where row `row` of batch b is, in pages of so many rows: the page and the row in it. Pages are clamped, as lengths
  // are; without pages it is where it says.
  struct Place {
    std::int64_t batch, row;
  };
  constexpr Place place(std::int64_t b, std::int64_t row, std::int64_t rows_of_page) const {
    if (!page_table.data) return {b, row};
    const std::int64_t n = row / rows_of_page;
    return {clamped(page_table[b * page_table_stride + n], 0, pages - 1), row - n * rows_of_page};
  }

  constexpr bool packed() const { return cu_seqlens.given; }
  // Of rows that are batched, or all of one batch if packed.
  constexpr std::int64_t batches() const { return packed() ? 1 : B; }

  // One sequence in x and pooled: first rows, keys that are used, pooled rows that it has, and those it had before keys
  // were appended.
  struct Sequence {
    std::int64_t x_begin = 0, pooled_begin = 0, keys = 0, pooled = 0, before = 0;
  };
  constexpr std::int64_t complete(std::int64_t keys) const { return keys < block ? 0 : (keys - block) / stride + 1; }
  // Of a batch: the most that are written.
  constexpr std::int64_t written_rows() const { return appended == 0 ? N : std::min(N, (appended - 1) / stride + 1); }
  // The n-th of them, and what it is made of. first == end: zeros. row < 0: nothing is written.
  struct Sum {
    std::int64_t batch = 0, row = -1, first = 0, end = 0;
  };
  constexpr Sum written_row(std::int64_t n) const {
    const std::int64_t rows = written_rows();
    Sum sum{.batch = n / rows};
    std::int64_t row = n - sum.batch * rows;
    const Sequence s = sequence(packed() ? sequence_of(row, true) : sum.batch);
    if (appended > 0 && (row += s.before) >= s.pooled) return sum;
    const std::int64_t c = row - s.pooled_begin;
    sum.row = row;
    sum.first = s.x_begin + c * stride;
    sum.end = c >= 0 && c < s.pooled ? sum.first + block : sum.first;
    return sum;
  }
  // Clamped, so that no row outside the tensors is named.
  constexpr Sequence sequence(std::int64_t b) const {
    Sequence s{.keys = S};
    if (cu_seqlens.data) {
      s.x_begin = clamped(cu_seqlens[b], 0, S);
      s.keys = clamped(cu_seqlens[b + 1], s.x_begin, S) - s.x_begin;
      s.pooled_begin = s.x_begin / stride;
    }
    if (seqused.data) s.keys = clamped(seqused[b], 0, s.keys);
    s.pooled = complete(s.keys);
    if (appended > 0) s.before = complete(s.keys - appended);
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
    const std::int64_t rows = appended == 0 ? S + N : written_rows() * (block + 1);
    return static_cast<double>(batches() * rows * H * D) * static_cast<double>(size_of(x.dtype));
  }
};

struct PoolBackwardProblem : PoolProblem {};

using PoolKernel = Kernel<PoolProblem>;
using PoolBackwardKernel = Kernel<PoolBackwardProblem>;

}  // namespace heddle

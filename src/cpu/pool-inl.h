// Means of blocks of keys, and their gradient: head dimensions in lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/plan.h"
#include "cpu/simd-inl.h"
#include "problem/pool.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Columns of a row at a time.
constexpr std::int64_t kPoolColumns = 256;

// Row `to_row` of `to`, every head: the sum of rows [first, end) of `from`, in their order, over `block`. Pages have
// so many rows of either; without pages that says nothing.
inline void SumRows(const PoolProblem& p, const Operand& from, std::int64_t from_page, std::int64_t first,
                    std::int64_t end, const Operand& to, std::int64_t to_page, std::int64_t to_row,
                    std::int64_t batch) {
  const DF d;
  alignas(64) float sum[kPoolColumns], line[kPoolColumns];
  const VF block = hn::Set(d, static_cast<float>(p.block));
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t column = 0; column < p.D; column += kPoolColumns) {
      const std::int64_t count = std::min(kPoolColumns, p.D - column), width = round_up(count, kLanes);
      const auto place = [&](const Operand& x, std::int64_t rows_of_page, std::int64_t row) {
        const PoolProblem::Place at = p.place(batch, row, rows_of_page);
        return x.at(at.batch, at.row, h) + column * x.stride_d * static_cast<std::int64_t>(size_of(x.dtype));
      };
      std::fill_n(sum, width, 0.0f);
      for (std::int64_t row = first; row < end; ++row) {
        LoadRow(place(from, from_page, row), from.dtype, from.stride_d, count, width, line);
        for (std::int64_t k = 0; k < width; k += kLanes) {
          hn::StoreU(hn::Add(hn::LoadU(d, sum + k), hn::LoadU(d, line + k)), d, sum + k);
        }
      }
      for (std::int64_t k = 0; k < width; k += kLanes) hn::StoreU(hn::Div(hn::LoadU(d, sum + k), block), d, sum + k);
      StoreRow(sum, count, place(to, to_page, to_row), to.dtype, to.stride_d);
    }
  }
}

// Rows [begin, end) of those that are written.
inline void PoolKeys(const PoolProblem& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t n = begin; n < end; ++n) {
    const PoolProblem::Sum sum = p.written_row(n);
    if (sum.row < 0) continue;
    SumRows(p, p.x, p.page_size, sum.first, sum.end, p.pooled, p.pooled_page_size(), sum.row, sum.batch);
  }
}

// Keys [begin, end), counted b * S + j.
inline void PoolKeysBackward(const PoolBackwardProblem& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t batch = at / p.S, row = at % p.S;
    const PoolProblem::Sequence s = p.sequence(p.packed() ? p.sequence_of(row, false) : batch);
    const std::int64_t j = row - s.x_begin, after = std::min(s.pooled, j / p.stride + 1);
    const std::int64_t first = std::min(after, j < p.block ? 0 : (j - p.block) / p.stride + 1);
    SumRows(p, p.pooled, 0, s.pooled_begin + first, s.pooled_begin + after, p.x, 0, row, batch);
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

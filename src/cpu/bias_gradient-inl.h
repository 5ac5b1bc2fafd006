// The gradient of the additive bias, a pass of its own over S and dP: whoever shares an element of the bias then adds
// in one order, whatever the threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/attention_bwd-inl.h"
#include "cpu/plan.h"
#include "cpu/scores-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Sums of a row of dbias: one for each of its columns, of keys where it has but one, which is their sum.
inline std::int64_t BiasSumColumns(const AttentionBackwardProblem& p) {
  return p.bias_columns == 1 ? p.Sk : p.bias_columns;
}
inline std::int64_t BiasSums(const AttentionBackwardProblem& p) {
  return round_up((p.bias_rows == 1 ? 1 : kBiasRows) * BiasSumColumns(p), 16);
}
inline std::size_t BiasScratch(const AttentionBackwardProblem& p) {
  return static_cast<std::size_t>(BiasSums(p)) * 4 +
         WithBackwardTile(p, kBiasRows, nullptr, [](auto& tile) { return tile.bytes(); });
}

inline void BiasGradient(const AttentionBackwardProblem& p, const BiasTask& task, std::byte* memory) {
  auto* sums = reinterpret_cast<float*>(memory);
  memory += BiasSums(p) * 4;
  const std::int64_t rows = p.bias_rows == 1 ? 1 : task.row_end - task.row_begin;
  const std::int64_t columns = BiasSumColumns(p);
  std::memset(sums, 0, static_cast<std::size_t>(rows * columns) * 4);
  const std::int64_t b_end = p.bias_batch == 1 ? p.B : task.bias_b + 1,
                     h_end = p.bias_heads == 1 ? p.H : task.bias_h + 1;
  for (std::int64_t b = task.bias_b; b < b_end; ++b) {
    for (std::int64_t h = task.bias_h; h < h_end; ++h) {
      // One query head alone: its kv head becomes the only one.
      AttentionBackwardProblem one = p;
      one.G = 1;
      for (Operand* x : {&one.k, &one.v}) {
        if (x->data != nullptr) x->data = x->at(0, 0, h / p.G);  // without keys there may be no address
        x->stride_h = 0;
      }
      const Sequence s = p.sequence(b);
      const Head head{one, b, h, s};
      float* const first = sums + (p.bias_columns == 1 ? 0 : s.key_offset);
      WithBackwardTile(one, kBiasRows, memory, [&](auto& tile) {
        for (std::int64_t i = task.row_begin; i < std::min(task.row_end, s.sq); i += kBiasRows) {
          float* to = p.bias_rows == 1 ? first : first + (i - task.row_begin) * columns;
          tile.add_bias_gradient(head, i, std::min({i + kBiasRows, task.row_end, s.sq}), to,
                                 p.bias_rows == 1 ? 0 : columns);
        }
      });
    }
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t at = p.bias_rows == 1 ? 0 : task.row_begin + i;
    for (std::int64_t j = 0; j < p.bias_columns; ++j) {
      double value = 0;
      if (p.bias_columns == columns) {
        value = sums[i * columns + j];
      } else {
        for (std::int64_t k = 0; k < columns; ++k) value += sums[i * columns + k];
      }
      store_element(p.dbias.data, p.dbias.dtype, p.dbias.offset(task.bias_b, task.bias_h, at, j),
                    static_cast<float>(value));
    }
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

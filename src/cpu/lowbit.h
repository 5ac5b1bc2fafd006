// Quantisation on the CPU, rows spread over an executor: the candidates, and what others ask of them.
#pragma once

#include <cstdint>

#include "heddle/runtime.h"
#include "problem/quantize.h"

namespace heddle::cpu {

extern const lowbit::QuantizeKernel kQuantize;      // "cpu"
extern const lowbit::DequantizeKernel kDequantize;  // "cpu"

// The bits of the largest |weight|; NaN counts above infinity.
std::uint32_t largest_weight(const lowbit::Weights& weights, std::int64_t rows, std::int64_t columns,
                             Executor& executor);

void dequantize(const lowbit::Matrix& matrix, const lowbit::Weights& out, Executor& executor);

// Sums over one row of d = dequantised - weight.
struct RowError {
  double noise = 0, signal = 0;   // of d^2, w^2
  double magnitude = 0, max = 0;  // of |d|
  std::int64_t max_column = 0;
};

// errors: [N].
void row_errors(const lowbit::Weights& weights, const lowbit::Matrix& matrix, RowError* errors, Executor& executor);

}  // namespace heddle::cpu

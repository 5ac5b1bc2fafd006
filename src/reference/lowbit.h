// The yardstick of quantisation: one weight after the other, sums in double. Kernels must give the same bits.
#pragma once

#include "problem/quantize.h"

namespace heddle::reference {

extern const lowbit::QuantizeKernel kQuantize;      // "reference"
extern const lowbit::DequantizeKernel kDequantize;  // "reference"

// Writes codes, scales and zero points; the problem's global scale is set. Weights are finite.
void quantize(const lowbit::QuantizeProblem& problem);

// W[n, k] as the format defines it.
float dequantized(const lowbit::Matrix& matrix, std::int64_t n, std::int64_t k);

}  // namespace heddle::reference

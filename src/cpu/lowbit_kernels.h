// What one SIMD target does for low-bit weights (see kernels.h). Rows are independent.
#pragma once

#include <cstdint>

#include "problem/quantize.h"

namespace heddle::cpu {

// Columns that pass through a kernel's buffers at a time; a multiple of every group that is not a whole row.
constexpr std::int64_t kLowbitChunk = 4096;

struct LowbitKernels {
  // The bits of the largest |weight| of a row; NaN counts above infinity.
  std::uint32_t (*largest)(const lowbit::Weights&, std::int64_t row, std::int64_t columns);
  // Writes codes, scales and zero points of a row of finite weights.
  void (*encode)(const lowbit::QuantizeProblem&, std::int64_t row);
  // Weights [begin, begin + count) of a row; `begin` is a multiple of kLowbitChunk, `count` at most that.
  void (*decode)(const lowbit::Matrix&, std::int64_t row, std::int64_t begin, std::int64_t count, float* to);
};

}  // namespace heddle::cpu

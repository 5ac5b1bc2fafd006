// Quantisation on the GPU, on `stream`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/quantize.h"

namespace heddle::cuda {

// What the host reads back of a quantisation, to find that its inputs were as they must be.
struct QuantizeFindings {
  std::uint32_t largest = 0;         // bits of the largest |weight|; NaN counts above infinity
  std::uint32_t bad_importance = 0;  // the first column whose importance is not finite or negative; none: ~0
};
constexpr std::size_t kQuantizeWorkspace = 256;

// Puts all of it on the stream. A global scale of 0 stands for the matrix's own.
void start_quantize(const lowbit::QuantizeProblem& problem, void* workspace, void* stream);
// And waits for it, and says what was found.
QuantizeFindings quantize(const lowbit::QuantizeProblem& problem, void* workspace, void* stream);

// The first weight of the matrix, row after row, that is not finite or whose magnitude is above `limit`. There is one.
struct FoundWeight {
  std::int64_t row = 0, column = 0;
  float value = 0.0f;
};
FoundWeight first_weight_beyond(const lowbit::QuantizeProblem& problem, float limit, void* workspace, void* stream);
float importance_at(const lowbit::QuantizeProblem& problem, std::uint32_t column, void* stream);

// Only puts it on the stream.
void dequantize(const lowbit::Matrix& matrix, const lowbit::Weights& out, void* stream);

}  // namespace heddle::cuda

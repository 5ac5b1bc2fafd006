// Arguments of quantisation, checked.
#pragma once

#include "core/check.h"
#include "core/lowbit_problem.h"

namespace heddle::lowbit {

// [N, K] of f32, f16 or bf16 in CPU memory.
Weights checked_weights(const Check& check, const TensorView& view, const char* name);

// The storage that matrix.format, rows and columns ask for; `name` is what the caller calls the matrix.
Matrix checked_matrix(const Check& check, const QuantizedMatrix& matrix, const char* name);

// All but the values of the weights.
QuantizeProblem checked_problem(const Check& check, const TensorView& weights, const QuantizeOptions& options,
                                const QuantizedMatrix& out);

// Throws if `largest`, the bits of the largest |weight|, is not finite or is beyond what the format's scales hold,
// naming the first weight that is.
void check_values(const Check& check, const QuantizeProblem& problem, std::uint32_t largest);

}  // namespace heddle::lowbit

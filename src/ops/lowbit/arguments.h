// Arguments of quantisation, checked.
#pragma once

#include <optional>

#include "core/check.h"
#include "problem/quantize.h"

namespace heddle::lowbit {

// [N, K] of f32, f16 or bf16 where `device` says, or anywhere.
Weights checked_weights(const Check& check, const TensorView& view, const char* name,
                        std::optional<Device> device = Device::cpu);

// The storage that matrix.format, rows and columns ask for, all of it where `device` says; `name` is what the caller
// calls the matrix.
Matrix checked_matrix(const Check& check, const QuantizedMatrix& matrix, const char* name, Device device = Device::cpu);

// f32 [K], contiguous, of finite values of at least 0 (looked at on the CPU alone), with a rule that searches; null
// where it is not given.
const float* checked_importance(const Check& check, const TensorView& importance, ScaleRule rule, std::int64_t K,
                                Device device);

// All but the values of the weights, and on a GPU of the importance. All tensors are where the weights are.
QuantizeProblem checked_problem(const Check& check, const TensorView& weights, const QuantizeOptions& options,
                                const QuantizedMatrix& out);

// Throws for weight [n, k], which is not finite or beyond weight_limit().
[[noreturn]] void refuse_weight(const Format& format, std::int64_t n, std::int64_t k, float w);
[[noreturn]] void refuse_importance(std::int64_t k, float value);

}  // namespace heddle::lowbit

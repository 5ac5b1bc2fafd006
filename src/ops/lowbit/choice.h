// The candidates for quantisation, its undoing, and packed weights as floats.
#pragma once

#include "ops/choice.h"
#include "problem/quantize.h"
#include "problem/unpack_weights.h"

namespace heddle {

template <>
std::span<const lowbit::QuantizeKernel* const> PlainOperation<lowbit::QuantizeCall>::candidates();
template <>
std::span<const lowbit::DequantizeKernel* const> PlainOperation<lowbit::DequantizeProblem>::candidates();
template <>
std::span<const UnpackKernel* const> PlainOperation<UnpackProblem>::candidates();
template <>
inline Device PlainOperation<UnpackProblem>::device(const UnpackProblem& problem) {
  return problem.weights.device;
}

template <>
struct Operation<lowbit::QuantizeCall> : PlainOperation<lowbit::QuantizeCall> {};
template <>
struct Operation<lowbit::DequantizeProblem> : PlainOperation<lowbit::DequantizeProblem> {};
template <>
struct Operation<UnpackProblem> : PlainOperation<UnpackProblem> {};

}  // namespace heddle

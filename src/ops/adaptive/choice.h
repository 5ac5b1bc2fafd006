// The candidates for attention with a tolerance.
#pragma once

#include "ops/choice.h"
#include "problem/adaptive.h"

namespace heddle {

template <>
std::span<const AdaptiveForwardKernel* const> PlainOperation<AdaptiveProblem>::candidates();
template <>
std::span<const AdaptiveBackwardKernel* const> PlainOperation<AdaptiveBackwardProblem>::candidates();

template <>
struct Operation<AdaptiveProblem> : PlainOperation<AdaptiveProblem> {};
template <>
struct Operation<AdaptiveBackwardProblem> : PlainOperation<AdaptiveBackwardProblem> {};

}  // namespace heddle

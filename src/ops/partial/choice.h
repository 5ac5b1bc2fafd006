// The candidates for merges of partial results and their gradients.
#pragma once

#include "ops/choice.h"
#include "problem/partial.h"

namespace heddle {

template <>
std::span<const MergeKernel* const> PlainOperation<MergeProblem>::candidates();
template <>
std::span<const MergeBackwardKernel* const> PlainOperation<MergeBackwardProblem>::candidates();

template <>
struct Operation<MergeProblem> : PlainOperation<MergeProblem> {};
template <>
struct Operation<MergeBackwardProblem> : PlainOperation<MergeBackwardProblem> {};

}  // namespace heddle

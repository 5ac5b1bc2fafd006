// The candidates for attention over lists of key blocks.
#pragma once

#include "ops/choice.h"
#include "problem/sparse.h"

namespace heddle {

template <>
std::span<const SparseForwardKernel* const> PlainOperation<SparseProblem>::candidates();
template <>
std::span<const SparseBackwardKernel* const> PlainOperation<SparseBackwardProblem>::candidates();

template <>
struct Operation<SparseProblem> : PlainOperation<SparseProblem> {};
template <>
struct Operation<SparseBackwardProblem> : PlainOperation<SparseBackwardProblem> {};

}  // namespace heddle

// The candidates for pooling keys, its gradient, and the choice of blocks.
#pragma once

#include "ops/choice.h"
#include "problem/pool.h"
#include "problem/select_blocks.h"

namespace heddle {

template <>
std::span<const PoolKernel* const> PlainOperation<PoolProblem>::candidates();
template <>
std::span<const PoolBackwardKernel* const> PlainOperation<PoolBackwardProblem>::candidates();
template <>
std::span<const SelectKernel* const> PlainOperation<SelectProblem>::candidates();

template <>
struct Operation<PoolProblem> : PlainOperation<PoolProblem> {};
template <>
struct Operation<PoolBackwardProblem> : PlainOperation<PoolBackwardProblem> {};
template <>
struct Operation<SelectProblem> : PlainOperation<SelectProblem> {};

}  // namespace heddle

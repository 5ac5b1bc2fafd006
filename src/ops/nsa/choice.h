// The candidates for pooling keys, its gradient, and the choice of blocks, sums of gated branches, and a step of
// decoding.
#pragma once

#include "ops/choice.h"
#include "problem/gate_branches.h"
#include "problem/nsa_step.h"
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
std::span<const GateKernel* const> PlainOperation<GateProblem>::candidates();
template <>
std::span<const GateBackwardKernel* const> PlainOperation<GateBackwardProblem>::candidates();
template <>
std::span<const NsaStepKernel* const> PlainOperation<NsaStepProblem>::candidates();

template <>
struct Operation<PoolProblem> : PlainOperation<PoolProblem> {};
template <>
struct Operation<PoolBackwardProblem> : PlainOperation<PoolBackwardProblem> {};
template <>
struct Operation<SelectProblem> : PlainOperation<SelectProblem> {};
template <>
struct Operation<GateProblem> : PlainOperation<GateProblem> {};
template <>
struct Operation<GateBackwardProblem> : PlainOperation<GateBackwardProblem> {};
template <>
struct Operation<NsaStepProblem> : PlainOperation<NsaStepProblem> {};

}  // namespace heddle

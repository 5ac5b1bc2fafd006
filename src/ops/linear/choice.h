// The candidates for linear layers and their gradients.
#pragma once

#include <span>
#include <utility>

#include "ops/choice.h"
#include "problem/linear.h"

namespace heddle {

inline const LinearProblem& forward_of(const LinearProblem& problem) { return problem; }
inline const LinearProblem& forward_of(const LinearBackwardProblem& problem) { return problem.forward; }

template <class Problem>
struct LinearOperation : PlainOperation<Problem> {
  static std::span<const Kernel<Problem>* const> candidates();
  static Device device(const Problem& problem) { return forward_of(problem).device; }
  static Refusal missing(unsigned extras, const Problem& problem) {
    const bool normed = forward_of(problem).norm.kind != Norm::none;
    return normed && (extras & kNormInFront) == 0 ? "it has no norm in front of the product" : "";
  }
};
template <>
std::span<const LinearKernel* const> LinearOperation<LinearProblem>::candidates();
template <>
std::span<const LinearBackwardKernel* const> LinearOperation<LinearBackwardProblem>::candidates();
template <>
struct Operation<LinearProblem> : LinearOperation<LinearProblem> {};
template <>
struct Operation<LinearBackwardProblem> : LinearOperation<LinearBackwardProblem> {};

}  // namespace heddle

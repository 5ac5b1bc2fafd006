// The candidates for attention and its gradients, and how they are compared.
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "heddle/attention.h"
#include "ops/choice.h"
#include "problem/attention.h"

namespace heddle {

// The last bit of Extra; choice.cc has a sentence for each up to it.
constexpr Extra kLastExtra = kSteps;

// Whether the choice may depend on the batch.
bool sees_batch(const AttentionProblem& problem);

// What estimates are asked for in the problem's place when GPUs' candidates are compared, if it is not the problem: for
// a call that must not see its batch, and for a piece of few rows. On the CPU one candidate of each method runs by
// itself, and estimates may read index data.
std::optional<AttentionProblem> as_compared(const AttentionProblem& problem);
std::optional<AttentionBackwardProblem> as_compared(const AttentionBackwardProblem& problem);

// A packed sequence must get the same kernel beside a long one, which decode kernels do not take: they are for when no
// other serves.
inline bool comes_last(const AttentionForwardKernel& kernel, const AttentionProblem& problem) {
  return kernel.for_decode && problem.cu_seqlens_q && !sees_batch(problem);
}
inline bool comes_last(const AttentionBackwardKernel&, const AttentionBackwardProblem&) { return false; }

template <class Problem>
auto attention_ranking(const Problem& problem, int workers) {
  return [&problem, workers, compared = as_compared(problem)](const auto& kernel) {
    return std::pair(comes_last(kernel, problem), kernel.estimate(compared ? *compared : problem, workers));
  };
}

template <>
struct Operation<AttentionProblem> {
  static std::span<const AttentionForwardKernel* const> candidates();
  static Device device(const AttentionProblem& problem) { return problem.device; }
  static Refusal missing(unsigned extras, const AttentionProblem& problem);
  static auto ranking(const AttentionProblem& problem, int workers) { return attention_ranking(problem, workers); }
};

template <>
struct Operation<AttentionBackwardProblem> {
  static std::span<const AttentionBackwardKernel* const> candidates();
  static Device device(const AttentionBackwardProblem& problem) { return problem.device; }
  static Refusal missing(unsigned extras, const AttentionBackwardProblem& problem);
  static auto ranking(const AttentionBackwardProblem& problem, int workers) {
    return attention_ranking(problem, workers);
  }
};

// Of a call with these options.
template <class Problem>
Wish attention_wish(const Check& check, const AttentionOptions& options) {
  const std::string& method = options.method;
  check.require(method.empty() || method == "flash" || method == "baseline", "method is '", method,
                "': it must be 'flash', 'baseline' or empty for a free choice");
  return wish_of<Problem>(check, options.force, method);
}

}  // namespace heddle

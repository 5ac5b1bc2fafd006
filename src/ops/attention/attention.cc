// attention_forward, attention_backward and what explains them: check, ask each candidate, choose, launch.
#include "ops/attention/attention.h"

#include <algorithm>

#include "ops/attention/arguments.h"
#include "ops/attention/choice.h"
#include "ops/validate.h"

namespace heddle {
std::size_t attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                        const AttentionOptions& options, const Runtime& runtime) {
  const Check check("attention_forward", Data::to_come);
  const AttentionProblem problem = checked_forward_problem(check, q, k, v, {}, {}, options);
  const int workers = workers_of(runtime);
  return choose(check, problem, attention_wish<AttentionProblem>(check, options), workers).workspace(problem, workers);
}

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                       const TensorView& lse, const AttentionOptions& options, const Runtime& runtime) {
  attention_forward_with(q, k, v, o, lse, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

void attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                            const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                            const std::function<Workspace(std::size_t bytes)>& scratch, const OutputNames& outputs) {
  const Check check("attention_forward");
  check.require(o.given(), "o is missing");
  const AttentionProblem problem = checked_forward_problem(check, q, k, v, o, lse, options, {}, outputs);
  const int workers = workers_of(runtime);
  const AttentionForwardKernel& kernel =
      choose(check, problem, attention_wish<AttentionProblem>(check, options), workers);
  const std::size_t needed = kernel.workspace(problem, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_attention_indices("attention_forward", problem, with);
  run(check, "attention_forward", kernel, problem, with, needed);
}

std::size_t attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionGradients& gradients, const AttentionOptions& options,
                                         const Runtime& runtime) {
  const Check check("attention_backward", Data::to_come);
  const AttentionBackwardProblem problem = checked_backward_problem(check, q, k, v, {}, {}, {}, {}, gradients, options);
  const int workers = workers_of(runtime);
  const Wish wish = attention_wish<AttentionBackwardProblem>(check, options);
  // Which candidate runs may depend on how o and d_o lie, which is not known here: enough for each that may.
  std::size_t bytes = choose(check, problem, wish, workers).workspace(problem, workers);
  for (const AttentionBackwardKernel* kernel : Operation<AttentionBackwardProblem>::candidates()) {
    if (refusal(*kernel, problem, wish).empty()) bytes = std::max(bytes, kernel->workspace(problem, workers));
  }
  return bytes;
}

void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                        const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                        const AttentionGradients& gradients, const AttentionOptions& options, const Runtime& runtime) {
  attention_backward_with(q, k, v, o, lse, d_o, d_lse, gradients, options, runtime,
                          [&](std::size_t) { return runtime.workspace; });
}

void attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const AttentionGradients& gradients, const AttentionOptions& options,
                             const Runtime& runtime, const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("attention_backward");
  check.require(o.given(), "o is missing");
  check.require(lse.given(), "lse is missing: attention_forward writes it");
  check.require(d_o.given(), "d_o is missing");
  const AttentionBackwardProblem problem =
      checked_backward_problem(check, q, k, v, o, lse, d_o, d_lse, gradients, options);
  const int workers = workers_of(runtime);
  const AttentionBackwardKernel& kernel =
      choose(check, problem, attention_wish<AttentionBackwardProblem>(check, options), workers);
  const std::size_t needed = kernel.workspace(problem, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  check_attention_indices("attention_backward", problem, with);
  run(check, "attention_backward", kernel, problem, with, needed);
}

std::vector<Candidate> explain_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionOptions& options, const Runtime& runtime) {
  const Check check("explain_attention", Data::to_come);
  return explained(checked_forward_problem(check, q, k, v, {}, {}, options),
                   attention_wish<AttentionProblem>(check, options), workers_of(runtime));
}

std::vector<Candidate> explain_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const AttentionGradients& gradients, const AttentionOptions& options,
                                                  const Runtime& runtime) {
  const Check check("explain_attention_backward", Data::to_come);
  return explained(checked_backward_problem(check, q, k, v, {}, {}, {}, {}, gradients, options),
                   attention_wish<AttentionBackwardProblem>(check, options), workers_of(runtime));
}

}  // namespace heddle

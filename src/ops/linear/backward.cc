// linear_backward and explain_linear_backward: check, ask each candidate, choose, launch.
#include "core/check.h"
#include "heddle/linear.h"
#include "ops/linear/arguments.h"
#include "ops/linear/choice.h"

namespace heddle {

void linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                     const LinearGradients& gradients, const LinearOptions& options, const Runtime& runtime) {
  const Check check("linear_backward");
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  const int workers = workers_of(runtime);
  const LinearBackwardKernel& kernel =
      choose(check, problem, wish_of<LinearBackwardProblem>(check, options.force), workers);
  run(check, "linear_backward", kernel, problem, runtime, kernel.workspace(problem, workers));
}

std::size_t linear_backward_workspace(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                      const LinearGradients& gradients, const LinearOptions& options,
                                      const Runtime& runtime) {
  const Check check("linear_backward", Data::to_come);
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  const int workers = workers_of(runtime);
  return choose(check, problem, wish_of<LinearBackwardProblem>(check, options.force), workers)
      .workspace(problem, workers);
}

std::vector<Candidate> explain_linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                               const LinearGradients& gradients, const LinearOptions& options,
                                               const Runtime& runtime) {
  const Check check("explain_linear_backward", Data::to_come);
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  return explained(problem, wish_of<LinearBackwardProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle

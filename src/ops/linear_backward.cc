// linear_backward and explain_linear_backward: check, ask each candidate, choose, launch.
#include "core/check.h"
#include "cpu/linear.h"
#include "cuda/assumed_gpu.h"
#include "cuda/linear.h"
#include "heddle/linear.h"
#include "ops/attention.h"
#include "ops/linear_arguments.h"
#include "ops/linear_choice.h"
#include "reference/linear.h"

namespace heddle {
namespace {

constexpr const LinearBackwardKernel* kCandidates[] = {&cpu::kLinearBackward, &reference::kLinearBackward,
                                                       &cuda::kCublasLtLinearBackward};

}  // namespace

void linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                     const LinearGradients& gradients, const LinearOptions& options, const Runtime& given) {
  const Check check("linear_backward");
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  Runtime runtime = given;
  if (runtime.executor == nullptr) runtime.executor = &default_executor();
  const int workers = runtime.executor->workers();
  const LinearBackwardKernel& kernel = choose(check, kCandidates, problem, options.force, workers);
  check_workspace(check, runtime.workspace, kernel.workspace(problem, workers));
  if (kernel.device == Device::cuda) cuda::require_gpu_that_is_here("linear_backward");
  kernel.launch(problem, runtime);
}

std::size_t linear_backward_workspace(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                      const LinearGradients& gradients, const LinearOptions& options,
                                      const Runtime& runtime) {
  const Check check("linear_backward");
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  const int workers = workers_of(runtime);
  return choose(check, kCandidates, problem, options.force, workers).workspace(problem, workers);
}

std::vector<Candidate> explain_linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                               const LinearGradients& gradients, const LinearOptions& options,
                                               const Runtime& runtime) {
  const Check check("explain_linear_backward");
  const LinearBackwardProblem problem = checked_linear_backward_problem(check, dy, x, weights, gradients, options);
  return explained(kCandidates, problem, options.force, workers_of(runtime));
}

}  // namespace heddle

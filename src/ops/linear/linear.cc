// linear_forward and explain_linear: check, ask each candidate, choose, launch.
#include "heddle/linear.h"

#include "core/check.h"
#include "core/names.h"
#include "cuda/linear.h"
#include "ops/linear/arguments.h"
#include "ops/linear/choice.h"
#include "ops/linear/linear.h"
#include "ops/linear/names.h"

namespace heddle {
namespace {

constexpr NamedValue<Activation> kActivations[] = {
    {"none", Activation::none},           {"relu", Activation::relu}, {"gelu_erf", Activation::gelu_erf},
    {"gelu_tanh", Activation::gelu_tanh}, {"silu", Activation::silu}, {"swiglu", Activation::swiglu}};

constexpr NamedValue<Norm> kNorms[] = {
    {"none", Norm::none}, {"layer_norm", Norm::layer_norm}, {"rms_norm", Norm::rms_norm}};

}  // namespace

std::vector<std::string> activation_names() { return names_in(kActivations); }
Activation activation_named(std::string_view name) { return value_named(kActivations, name, "linear", "activation"); }
const char* name_of(Activation activation) { return name_in(kActivations, activation); }

std::vector<std::string> norm_names() { return names_in(kNorms); }
Norm norm_named(std::string_view name) { return value_named(kNorms, name, "linear", "norm"); }
const char* name_of(Norm norm) { return name_in(kNorms, norm); }

void linear_forward(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                    const LinearOptions& options, const Runtime& runtime,
                    const std::function<Workspace(std::size_t)>& allocate) {
  linear_forward_with(x, weights, y, options, runtime, allocate, "y");
}

void linear_forward_with(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                         const LinearOptions& options, const Runtime& given,
                         const std::function<Workspace(std::size_t)>& allocate, const char* y_name) {
  const Check check("linear_forward");
  check.require(y.given(), y_name, " is missing");
  const LinearProblem problem = checked_linear_problem(check, x, weights, y, options, y_name);
  const int workers = workers_of(given);
  const LinearKernel& kernel = choose(check, problem, wish_of<LinearProblem>(check, options.force), workers);
  const std::size_t bytes = kernel.workspace(problem, workers);
  Runtime runtime = given;
  runtime.workspace = bytes > 0 ? allocate(bytes) : Workspace{};
  run(check, "linear_forward", kernel, problem, runtime, bytes);
}

void linear_forward(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                    const LinearOptions& options, const Runtime& runtime) {
  linear_forward(x, weights, y, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

std::size_t linear_forward_workspace(const TensorView& x, const PackedWeights& weights, const LinearOptions& options,
                                     const Runtime& runtime) {
  const Check check("linear_forward", Data::to_come);
  const LinearProblem problem = checked_linear_problem(check, x, weights, {}, options);
  const int workers = workers_of(runtime);
  return choose(check, problem, wish_of<LinearProblem>(check, options.force), workers).workspace(problem, workers);
}

std::vector<Candidate> explain_linear(const TensorView& x, const PackedWeights& weights, const LinearOptions& options,
                                      const Runtime& runtime) {
  const Check check("explain_linear", Data::to_come);
  const LinearProblem problem = checked_linear_problem(check, x, weights, {}, options);
  std::vector<Candidate> list = explained(problem, wish_of<LinearProblem>(check, options.force), workers_of(runtime));
  const double wide = problem.device == Device::cuda ? cuda::seconds_of_16bit(problem) : 0.0;
  for (Candidate& c : list) {
    if (c.supported && wide > 0) c.of_16bit = c.seconds / wide;
  }
  return list;
}

}  // namespace heddle

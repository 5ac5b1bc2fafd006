// heddle explain adaptive: attention with a tolerance, or its gradients.
#include <memory>

#include "core/check.h"
#include "explain.h"
#include "heddle/adaptive.h"

namespace heddle::cli {
namespace {

struct ExplainAdaptive {
  Explained explained;
  ProblemFlags asked;
  double tol = 1e-2;  // that of AdaptiveOptions
  std::string pass = "forward";

  void run() {
    explained.begin();
    ProblemFlags problem = asked;
    problem.device = explained.device;
    const ProblemTensors tensors(problem, ProblemTensors::Memory::none);
    const TensorView &q = tensors.q, &k = tensors.k, &v = tensors.v;
    const AdaptiveOptions adaptive{.tol = static_cast<float>(tol)};
    // No kernel is a GPU's: the call refuses one that is assumed as it does one that is here.
    const auto candidates = pass == "forward" ? explain_adaptive_attention(q, k, v, adaptive, tensors.options)
                                              : explain_adaptive_attention_backward(q, k, v, {}, {}, tensors.options);
    explained.tell(
        problem.name() + ", " + name_of(dtype_named(problem.dtype)) + ", tol " + text(adaptive.tol) + ", " + pass,
        {{"problem", problem.json()}, {"tol", tol}, {"pass", pass}}, candidates);
  }
};

}  // namespace

void add_explain_adaptive(CLI::App& explain) {
  CLI::App* verb = explain.add_subcommand("adaptive", "Attention with a tolerance, or its gradients");
  examples(*verb, {"heddle explain adaptive --heads 32 --kv-heads 8 --length 4096 --tol 0.02 --causal top_left",
                   "heddle explain adaptive --packed --pass backward --dtype bf16"});
  const auto self = std::make_shared<ExplainAdaptive>();
  self->explained.add_to(*verb);
  self->asked.add_to(*verb);
  verb->add_option("--tol", self->tol, "Most that a row's bound may be, in units of the largest value")
      ->capture_default_str();
  add_pass_flag(*verb, self->pass);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli

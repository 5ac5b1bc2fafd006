// Attention with a tolerance: check, ask each candidate, choose, launch.
#include "ops/adaptive/adaptive.h"

#include "ops/adaptive/choice.h"
#include "ops/attention/arguments.h"
#include "ops/attention/problem_builder.h"

namespace heddle {
namespace {

// What attention has and attention with a tolerance has not. Before the problem is built, which reads index data of the
// CPU alone.
void check_options(const Check& check, const TensorView& q, const TensorView& k, const TensorView& v,
                   const AttentionOptions& options) {
  check.require(q.device == Device::cpu, "q is on a GPU: attention with a tolerance runs on the CPU");
  for (const auto& [name, view] : {Named{"q", &q}, Named{"k", &k}, Named{"v", &v}}) {
    check.require(view->dtype != DType::f8e4m3, name,
                  " is float8_e4m3fn: attention with a tolerance takes float32, float16 and bfloat16");
  }
  for (const auto& [name, view] :
       {Named{"bias", &options.bias}, Named{"mask", &options.mask}, Named{"draft_mask", &options.draft_mask}}) {
    check.require(!view->given(), name,
                  " is given: attention with a tolerance has none, as it replaces blocks of keys "
                  "that rows meet as a whole");
  }
  check.require(options.dropout.p == 0, "dropout.p is ", static_cast<double>(options.dropout.p),
                ": it must be 0, as attention with a tolerance has no dropout");
  check.require(options.precision == Precision::f32, "precision is not f32: attention with a tolerance has no other");
  check.require(options.method.empty(), "method is '", options.method,
                "': attention with a tolerance has one; leave it empty, or name a candidate as force");
}

ReplacedBlocks checked_blocks(const Check& check, const AttentionProblem& p, const TensorView& view) {
  if (!view.given()) return {};
  const int rank = p.cu_seqlens_q ? 3 : 4;
  check.tensor(view, "replaced", DType::u8, p.device, rank);
  const std::int64_t runs = adaptive_runs(p), bytes = (p.Sk + 8 * kAdaptiveKeys - 1) / (8 * kAdaptiveKeys);
  check.require((rank == 3 || view.shape[0] == p.B) && view.shape[rank - 3] == p.Hkv && view.shape[rank - 2] == runs &&
                    view.shape[rank - 1] >= bytes,
                "replaced is ", view, ": it must be ", rank == 3 ? text("[") : text("[", p.B, ", "), p.Hkv, ", ", runs,
                ", W], a run for each ", kAdaptiveRows, " rows, and W at least ", bytes, ", a bit for each ",
                kAdaptiveKeys, " keys");
  check.require(view.contiguous(), "replaced must be contiguous");
  check.addressable(view, "replaced");
  return {.data = static_cast<std::uint8_t*>(view.data),
          .given = true,
          .heads = p.Hkv,
          .runs = runs,
          .bytes = view.shape[rank - 1]};
}

}  // namespace

OnExceed on_exceed_named(std::string_view name) {
  if (name == "refine") return OnExceed::refine;
  if (name == "dense") return OnExceed::dense;
  if (name == "report") return OnExceed::report;
  throw Error(text("[adaptive_attention_forward] on_exceed is '", name, "': it must be refine, dense or report"));
}

AdaptiveProblem checked_adaptive_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const AdaptiveOutputs& outputs,
                                         const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                         const OutputNames& names) {
  check.require(adaptive.tol > 0 && adaptive.tol <= std::numeric_limits<float>::max(), "tol is ",
                static_cast<double>(adaptive.tol),
                ": it must be a finite number above 0, in units of the largest norm of a value");
  check_options(check, q, k, v, options);
  AdaptiveProblem p;
  static_cast<AttentionProblem&>(p) =
      checked_forward_problem(check, q, k, v, outputs.o, outputs.lse, options, {}, names);
  p.tol = adaptive.tol;
  if (outputs.bound.given()) {
    p.bound = ProblemBuilder(check, q, k, v, options).per_row(p, outputs.bound, "bound");
    check.not_overlapping(outputs.bound, "bound");
  }
  p.replaced = checked_blocks(check, p, outputs.replaced);
  const Named written[] = {
      {names.o, &outputs.o}, {names.lse, &outputs.lse}, {"bound", &outputs.bound}, {"replaced", &outputs.replaced}};
  const Named read[] = {{"q", &q}, {"k", &k}, {"v", &v}};
  check_apart(check, written, read);
  return p;
}

AdaptiveBackwardProblem checked_adaptive_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                          const TensorView& v, const TensorView& replaced,
                                                          const TensorView& o, const TensorView& lse,
                                                          const TensorView& d_o, const TensorView& d_lse,
                                                          const AttentionGradients& gradients,
                                                          const AttentionOptions& options) {
  check_options(check, q, k, v, options);
  check.require(!gradients.merged, "merged is set: attention with a tolerance has no gradients of a piece");
  AdaptiveBackwardProblem p;
  static_cast<AttentionBackwardProblem&>(p) =
      checked_backward_problem(check, q, k, v, o, lse, d_o, d_lse, gradients, options);
  p.replaced = checked_blocks(check, p, replaced);
  const Named outputs[] = {
      {"dq", &gradients.dq}, {"dk", &gradients.dk}, {"dv", &gradients.dv}, {"dsink", &gradients.dsink}};
  const Named inputs[] = {{"replaced", &replaced}};
  check_apart(check, outputs, inputs);
  return p;
}

std::size_t adaptive_attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                 const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                                 const Runtime& runtime) {
  const Check check("adaptive_attention_forward", Data::to_come);
  const AdaptiveProblem p = checked_adaptive_problem(check, q, k, v, {}, adaptive, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<AdaptiveProblem>(check, options.force), workers).workspace(p, workers);
}

void adaptive_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                                const AdaptiveOutputs& outputs, const AdaptiveOptions& adaptive,
                                const AttentionOptions& options, const Runtime& runtime) {
  adaptive_attention_forward_with(q, k, v, outputs, adaptive, options, runtime,
                                  [&](std::size_t) { return runtime.workspace; });
}

void adaptive_attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                     const AdaptiveOutputs& outputs, const AdaptiveOptions& adaptive,
                                     const AttentionOptions& options, const Runtime& runtime,
                                     const std::function<Workspace(std::size_t bytes)>& scratch,
                                     const OutputNames& names) {
  const Check check("adaptive_attention_forward");
  check.require(outputs.o.given(), names.o, " is missing");
  const AdaptiveProblem p = checked_adaptive_problem(check, q, k, v, outputs, adaptive, options, names);
  const int workers = workers_of(runtime);
  const AdaptiveForwardKernel& kernel = choose(check, p, wish_of<AdaptiveProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  run(check, "adaptive_attention_forward", kernel, p, with, needed);
}

std::vector<Candidate> explain_adaptive_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                                  const Runtime& runtime) {
  const Check check("explain_adaptive_attention", Data::to_come);
  return explained(checked_adaptive_problem(check, q, k, v, {}, adaptive, options),
                   wish_of<AdaptiveProblem>(check, options.force), workers_of(runtime));
}

std::size_t adaptive_attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                                  const TensorView& replaced, const AttentionGradients& gradients,
                                                  const AttentionOptions& options, const Runtime& runtime) {
  const Check check("adaptive_attention_backward", Data::to_come);
  const AdaptiveBackwardProblem p =
      checked_adaptive_backward_problem(check, q, k, v, replaced, {}, {}, {}, {}, gradients, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<AdaptiveBackwardProblem>(check, options.force), workers).workspace(p, workers);
}

void adaptive_attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const TensorView& replaced, const TensorView& o, const TensorView& lse,
                                 const TensorView& d_o, const TensorView& d_lse, const AttentionGradients& gradients,
                                 const AttentionOptions& options, const Runtime& runtime) {
  adaptive_attention_backward_with(q, k, v, replaced, o, lse, d_o, d_lse, gradients, options, runtime,
                                   [&](std::size_t) { return runtime.workspace; });
}

void adaptive_attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                      const TensorView& replaced, const TensorView& o, const TensorView& lse,
                                      const TensorView& d_o, const TensorView& d_lse,
                                      const AttentionGradients& gradients, const AttentionOptions& options,
                                      const Runtime& runtime,
                                      const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("adaptive_attention_backward");
  check.require(replaced.given(), "replaced is missing: adaptive_attention_forward writes it");
  check.require(o.given(), "o is missing");
  check.require(lse.given(), "lse is missing: adaptive_attention_forward writes it");
  check.require(d_o.given(), "d_o is missing");
  const AdaptiveBackwardProblem p =
      checked_adaptive_backward_problem(check, q, k, v, replaced, o, lse, d_o, d_lse, gradients, options);
  const int workers = workers_of(runtime);
  const AdaptiveBackwardKernel& kernel =
      choose(check, p, wish_of<AdaptiveBackwardProblem>(check, options.force), workers);
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  run(check, "adaptive_attention_backward", kernel, p, with, needed);
}

std::vector<Candidate> explain_adaptive_attention_backward(const TensorView& q, const TensorView& k,
                                                           const TensorView& v, const TensorView& replaced,
                                                           const AttentionGradients& gradients,
                                                           const AttentionOptions& options, const Runtime& runtime) {
  const Check check("explain_adaptive_attention_backward", Data::to_come);
  return explained(checked_adaptive_backward_problem(check, q, k, v, replaced, {}, {}, {}, {}, gradients, options),
                   wish_of<AdaptiveBackwardProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle

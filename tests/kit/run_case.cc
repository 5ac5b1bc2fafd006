#include "kit/run_case.h"

#include <chrono>
#include <cstring>

#include "core/check.h"

namespace heddle::kit {
namespace {

std::vector<std::int64_t> shape_of(const HostTensor& x) {
  const TensorView& view = x.view();
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

Comparison compare_tensor(const char* name, const HostTensor& out, const std::vector<double>& reference,
                          const PlainTensor& plain, DType operands, double factor) {
  return compare(name, out.values(), reference, plain, shape_of(out), out.view().dtype, operands, factor);
}

void fill(HostTensor& out, const std::vector<double>& values) {
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<std::int64_t>(n), values[n]);
}

Runtime runtime_with(WorkspaceBuffer& buffer, std::size_t bytes, int garbage, Executor* executor) {
  Runtime runtime;
  runtime.executor = executor;
  if (bytes > 0) {
    runtime.workspace = {buffer.get(bytes).data, bytes};
    std::memset(runtime.workspace.data, garbage, bytes);
  }
  return runtime;
}

template <class Operation>
double seconds_of(const Operation& operation) {
  const auto start = std::chrono::steady_clock::now();
  operation();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void judge(CaseResult& result, std::initializer_list<std::pair<const char*, const HostTensor*>> outputs) {
  result.passed = true;
  for (const auto& [name, tensor] : outputs) {
    if (!tensor->given()) continue;
    const std::string damage = tensor->damage();
    if (!damage.empty()) result.damage += text(result.damage.empty() ? "" : "; ", name, ": ", damage);
  }
  for (const Comparison& comparison : result.tensors) result.passed &= comparison.passed;
  result.passed &= result.damage.empty();
}

}  // namespace

std::string CaseResult::message() const {
  std::string out;
  for (const Comparison& c : tensors) {
    if (c.passed) continue;
    out += text(candidate, pass == Pass::forward ? " forward" : " backward", " on ", case_name, ": ", c.tensor,
                " is off by ", c.error, ", allowed ", c.bound, " (plain computation ", c.plain_error, ", floor ",
                c.floor, "); ", c.worst, "\n");
  }
  if (!damage.empty()) out += text(candidate, " on ", case_name, ": ", damage, "\n");
  return out;
}

CaseRunner::CaseRunner(const AttentionCase& spec, std::uint64_t seed) : data_(spec, seed) {}

std::vector<std::string> CaseRunner::candidates(Pass pass) const {
  std::vector<std::string> names;
  for (const Candidate& candidate :
       explain_attention(data_.q.view(), data_.k.view(), data_.v.view(), data_.options(), pass)) {
    if (candidate.supported && candidate.method != "reference") names.push_back(candidate.name);
  }
  return names;
}

ForwardOutputs CaseRunner::run_forward(const std::string& candidate, Executor* executor, int garbage) const {
  AttentionOptions options = data_.options();
  options.force = candidate;
  const TensorView &q = data_.q.view(), &k = data_.k.view(), &v = data_.v.view();
  Runtime query;
  query.executor = executor;
  WorkspaceBuffer buffer;
  const Runtime runtime = runtime_with(buffer, attention_forward_workspace(q, k, v, options, query), garbage, executor);
  ForwardOutputs out{data_.new_o(), data_.new_lse()};
  out.seconds = seconds_of([&] { attention_forward(q, k, v, out.o.view(), out.lse.view(), options, runtime); });
  return out;
}

BackwardOutputs CaseRunner::run_backward(const std::string& candidate, Executor* executor, int garbage) {
  const BackwardAnswer& answer = backward_answer();
  AttentionOptions options = data_.options();
  options.force = candidate;
  const TensorView &q = data_.q.view(), &k = data_.k.view(), &v = data_.v.view();
  BackwardOutputs out{data_.new_gradients()};
  const AttentionGradients gradients = out.gradients.views();
  Runtime query;
  query.executor = executor;
  WorkspaceBuffer buffer;
  const Runtime runtime =
      runtime_with(buffer, attention_backward_workspace(q, k, v, gradients, options, query), garbage, executor);
  out.seconds = seconds_of([&] {
    attention_backward(q, k, v, answer.o.view(), answer.lse.view(), data_.d_o.view(), data_.d_lse.view(), gradients,
                       options, runtime);
  });
  return out;
}

CaseResult CaseRunner::check_forward(const std::string& candidate, Executor* executor) {
  const ForwardOutputs out = run_forward(candidate, executor);
  const ForwardAnswer& answer = forward_answer();
  CaseResult result{data_.spec.name, candidate, Pass::forward};
  result.seconds = out.seconds;
  const DType dtype = data_.spec.dtype;
  result.tensors.push_back(compare_tensor("o", out.o, answer.reference.o, answer.plain.o, dtype, kFactor));
  result.tensors.push_back(compare_tensor("lse", out.lse, answer.reference.lse, answer.plain.lse, DType::f32, kFactor));
  judge(result, {{"o", &out.o}, {"lse", &out.lse}});
  return result;
}

CaseResult CaseRunner::check_backward(const std::string& candidate, Executor* executor) {
  const BackwardOutputs run = run_backward(candidate, executor);
  const BackwardAnswer& answer = backward_answer();
  CaseResult result{data_.spec.name, candidate, Pass::backward};
  result.seconds = run.seconds;
  const double factor = data_.spec.softcap > 0 ? kSoftcapGradientFactor : kFactor;
  const Gradients& out = run.gradients;
  const auto add = [&](const char* name, const HostTensor& tensor, const std::vector<double>& reference,
                       const PlainTensor& plain) {
    if (tensor.given()) {
      result.tensors.push_back(compare_tensor(name, tensor, reference, plain, data_.spec.dtype, factor));
    }
  };
  add("dq", out.dq, answer.reference.dq, answer.plain.dq);
  add("dk", out.dk, answer.reference.dk, answer.plain.dk);
  add("dv", out.dv, answer.reference.dv, answer.plain.dv);
  add("dbias", out.dbias, answer.reference.dbias, answer.plain.dbias);
  add("dsink", out.dsink, answer.reference.dsink, answer.plain.dsink);
  judge(result, {{"dq", &out.dq}, {"dk", &out.dk}, {"dv", &out.dv}, {"dbias", &out.dbias}, {"dsink", &out.dsink}});
  return result;
}

CaseResult CaseRunner::check(Pass pass, const std::string& candidate, Executor* executor) {
  return pass == Pass::forward ? check_forward(candidate, executor) : check_backward(candidate, executor);
}

const CaseRunner::ForwardAnswer& CaseRunner::forward_answer() {
  if (!forward_) {
    const AttentionProblem problem = data_.problem();
    forward_ = std::make_unique<ForwardAnswer>(
        ForwardAnswer{reference::attention_forward(problem, default_executor()), plain_forward(problem)});
  }
  return *forward_;
}

const CaseRunner::BackwardAnswer& CaseRunner::backward_answer() {
  if (!backward_) {
    const reference::Forward& forward = forward_answer().reference;
    const Gradients gradients = data_.new_gradients();
    const AttentionBackwardProblem problem = data_.backward_problem(gradients);
    backward_ =
        std::make_unique<BackwardAnswer>(BackwardAnswer{reference::attention_backward(problem, default_executor()),
                                                        plain_backward(problem), data_.new_o(), data_.new_lse()});
    fill(backward_->o, forward.o);
    fill(backward_->lse, forward.lse);
  }
  return *backward_;
}

CaseResult run_case(const AttentionCase& spec, Pass pass, const std::string& candidate, Executor* executor) {
  return CaseRunner(spec).check(pass, candidate, executor);
}

}  // namespace heddle::kit

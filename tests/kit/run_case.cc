#include "kit/run_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "core/check.h"

namespace heddle::kit {
namespace {

void fill(HostTensor& out, const std::vector<double>& values) {
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<std::int64_t>(n), values[n]);
}

// Scratch of exactly the size a call asks for, on either device, and the stream to run it on.
class CallRuntime {
 public:
  CallRuntime(Device device, std::size_t bytes, int garbage, Executor* executor) {
    runtime_.executor = executor;
    if (device == Device::cuda) {
      stream_.emplace();
      runtime_.stream = stream_->get();
      device_memory_ = DeviceMemory(bytes, garbage);
      if (bytes > 0) runtime_.workspace = {device_memory_.data(), bytes};
    } else if (bytes > 0) {
      runtime_.workspace = {host_memory_.get(bytes).data, bytes};
      std::memset(runtime_.workspace.data, garbage, bytes);
    }
  }

  operator const Runtime&() const { return runtime_; }
  void finish() const {
    if (stream_) stream_->synchronize();
  }

 private:
  Runtime runtime_;
  std::optional<DeviceStream> stream_;
  DeviceMemory device_memory_;
  WorkspaceBuffer host_memory_;
};

// An output where the candidate writes it: the host tensor itself, or its mirror, read back by finish().
class Output {
 public:
  Output(Device device, HostTensor& host) : host_(host) {
    if (device == Device::cuda) mirror_.emplace(host);
  }
  const TensorView& view() const { return mirror_ ? mirror_->view() : host_.view(); }
  void finish() {
    if (mirror_ && host_.given()) mirror_->read(host_);
  }

 private:
  HostTensor& host_;
  std::optional<DeviceTensor> mirror_;
};

}  // namespace

std::string CaseResult::message() const {
  std::string out;
  for (const Comparison& c : tensors) {
    if (c.passed) continue;
    out += text(candidate, pass == Pass::forward ? " forward" : " backward", " on ", case_name, ": ", c.tensor,
                " is off by ", c.error, ", allowed ", c.bound, " (plain computation ", c.plain_error, "); ", c.worst,
                "\n");
  }
  if (!damage.empty()) out += text(candidate, " on ", case_name, ": ", damage, "\n");
  for (const std::string& fault : faults) out += text(candidate, " on ", case_name, ": ", fault, "\n");
  return out;
}

CaseResult judged_by(CaseResult result, const std::vector<Judged>& outputs) {
  result.passed = true;
  for (const Judged& x : outputs) {
    if (!x.out->given()) continue;
    result.tensors.push_back(compare(x));
    result.passed &= result.tensors.back().passed;
    const std::string damage = x.out->damage();
    if (!damage.empty()) result.damage += text(result.damage.empty() ? "" : "; ", x.name, ": ", damage);
  }
  result.passed &= result.damage.empty();
  return result;
}

CaseRunner::CaseRunner(const AttentionCase& spec, std::uint64_t seed, Device device)
    : data_(spec, seed), device_(device), inputs_{data_.q.view(),   data_.k.view(),     data_.v.view(),
                                                  data_.d_o.view(), data_.d_lse.view(), data_.options()} {
  if (device == Device::cuda) mirror();
}

void CaseRunner::mirror() {
  const auto move = [&](TensorView& view, const HostTensor& host) {
    mirrors_.emplace_back(host);
    view = mirrors_.back().view();
  };
  move(inputs_.q, data_.q);
  move(inputs_.k, data_.k);
  move(inputs_.v, data_.v);
  move(inputs_.d_o, data_.d_o);
  move(inputs_.d_lse, data_.d_lse);
  AttentionOptions& options = inputs_.options;
  move(options.alibi_slopes, data_.alibi);
  move(options.bias, data_.bias);
  move(options.mask, data_.mask);
  move(options.sink, data_.sink);
  move(options.cu_seqlens_q, data_.cu_seqlens_q);
  move(options.cu_seqlens_k, data_.cu_seqlens_k);
  move(options.seqused_q, data_.seqused_q);
  move(options.seqused_k, data_.seqused_k);
  move(options.page_table, data_.page_table);
  move(options.cache_batch_idx, data_.cache_batch_idx);
  move(options.cache_leftpad, data_.leftpad);
  move(options.q_offset, data_.q_offset);
  move(options.key_offset, data_.key_offset);
  move(options.draft_mask, data_.draft_mask);
  move(options.q_scale, data_.q_scale);
  move(options.k_scale, data_.k_scale);
  move(options.v_scale, data_.v_scale);
  // Lengths are not read on a GPU.
  if (data_.spec.packed_q) options.max_seqlen_q = data_.spec.Sq;
  if (data_.spec.packed_k) options.max_seqlen_k = data_.spec.Sk;
}

std::vector<Candidate> CaseRunner::explain(Pass pass) const {
  const auto& [q, k, v, d_o, d_lse, options] = inputs_;
  if (pass == Pass::forward) return explain_attention(q, k, v, options);
  AttentionGradients gradients;
  gradients.dbias = options.bias;  // which not all candidates have
  gradients.dbias.data = nullptr;
  return explain_attention_backward(q, k, v, gradients, options);
}

std::vector<std::string> kernels_of(const std::vector<Candidate>& candidates) {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates) {
    if (candidate.supported && candidate.method != "reference") names.push_back(candidate.name);
  }
  return names;
}

ForwardOutputs CaseRunner::run_forward(const std::string& candidate, Executor* executor, int garbage) const {
  AttentionOptions options = inputs_.options;
  options.force = candidate;
  const auto& [q, k, v, d_o, d_lse, unforced] = inputs_;
  Runtime query;
  query.executor = executor;
  const CallRuntime runtime(device_, attention_forward_workspace(q, k, v, options, query), garbage, executor);
  ForwardOutputs out{data_.new_o(), data_.new_lse()};
  Output o(device_, out.o), lse(device_, out.lse);
  out.seconds = seconds_of([&] {
    attention_forward(q, k, v, o.view(), lse.view(), options, runtime);
    runtime.finish();
  });
  o.finish();
  lse.finish();
  return out;
}

BackwardOutputs CaseRunner::run_backward(const std::string& candidate, Executor* executor, int garbage,
                                         const Wanted& wanted) {
  const BackwardAnswer& answer = backward_answer();
  // The P of a backward in tf32 comes from scores that are as rounded as those that its lse was summed from.
  if (data_.spec.precision == Precision::tf32) {
    const ForwardOutputs forward = run_forward("");
    return run_backward_after(forward.o, forward.lse, candidate, executor, garbage, wanted);
  }
  return run_backward_after(answer.o, answer.lse, candidate, executor, garbage, wanted);
}

BackwardOutputs CaseRunner::run_backward_after(const HostTensor& o_in, const HostTensor& lse_in,
                                               const std::string& candidate, Executor* executor, int garbage,
                                               const Wanted& wanted) const {
  AttentionOptions options = inputs_.options;
  options.force = candidate;
  const auto& [q, k, v, d_o, d_lse, unforced] = inputs_;
  BackwardOutputs out{data_.new_gradients()};
  HostTensor o_copy = o_in, lse_copy = lse_in;
  const Output o(device_, o_copy), lse(device_, lse_copy);
  Gradients& g = out.gradients;
  const std::pair<HostTensor*, bool> wishes[] = {
      {&g.dq, wanted.dq}, {&g.dk, wanted.dk}, {&g.dv, wanted.dv}, {&g.dbias, wanted.dbias}, {&g.dsink, wanted.dsink}};
  for (const auto& [gradient, wish] : wishes) {
    if (!wish) *gradient = {};
  }
  Output dq(device_, g.dq), dk(device_, g.dk), dv(device_, g.dv), dbias(device_, g.dbias), dsink(device_, g.dsink);
  const AttentionGradients gradients{dq.view(), dk.view(), dv.view(), dbias.view(), dsink.view()};
  Runtime query;
  query.executor = executor;
  const CallRuntime runtime(device_, attention_backward_workspace(q, k, v, gradients, options, query), garbage,
                            executor);
  out.seconds = seconds_of([&] {
    attention_backward(q, k, v, o.view(), lse.view(), d_o, d_lse, gradients, options, runtime);
    runtime.finish();
  });
  for (Output* gradient : {&dq, &dk, &dv, &dbias, &dsink}) gradient->finish();
  return out;
}

std::vector<Judged> CaseRunner::judged(const ForwardOutputs& out) {
  const reference::Forward& exact = forward_reference();
  if (!plain_) plain_ = std::make_unique<PlainForward>(plain_forward(data_.problem()));
  const double factor = allowed_factor(data_.problem(), exact);
  return {{"o", &out.o, &exact.o, &plain_->o, factor}, {"lse", &out.lse, &exact.lse, &plain_->lse, factor}};
}

std::vector<Judged> CaseRunner::judged(const BackwardOutputs& out) {
  const auto& [exact, plain, o, lse] = backward_answer();
  const double factor = allowed_factor(data_.problem(), forward_reference());
  const Gradients& g = out.gradients;
  return {{"dq", &g.dq, &exact.dq, &plain.dq, factor},
          {"dk", &g.dk, &exact.dk, &plain.dk, factor},
          {"dv", &g.dv, &exact.dv, &plain.dv, factor},
          {"dbias", &g.dbias, &exact.dbias, &plain.dbias, factor},
          {"dsink", &g.dsink, &exact.dsink, &plain.dsink, kFactor}};  // sums over rows, however few
}

CaseResult CaseRunner::check_forward(const std::string& candidate, Executor* executor) {
  const ForwardOutputs out = run_forward(candidate, executor);
  return judged_by({.case_name = data_.spec.name, .candidate = candidate, .seconds = out.seconds}, judged(out));
}

CaseResult CaseRunner::check_backward(const std::string& candidate, Executor* executor, const Wanted& wanted) {
  const BackwardOutputs out = run_backward(candidate, executor, 0xFF, wanted);
  return judged_by(
      {.case_name = data_.spec.name, .candidate = candidate, .pass = Pass::backward, .seconds = out.seconds},
      judged(out));
}

std::string CaseRunner::blind_spots(Pass pass) {
  if (pass == Pass::forward) return kit::blind_spots(judged(ForwardOutputs{data_.new_o(), data_.new_lse()}));
  return kit::blind_spots(judged(BackwardOutputs{data_.new_gradients()}));
}

CaseResult CaseRunner::check(Pass pass, const std::string& candidate, Executor* executor) {
  return pass == Pass::forward ? check_forward(candidate, executor) : check_backward(candidate, executor);
}

const reference::Forward& CaseRunner::forward_reference() {
  if (!forward_) {
    forward_ = std::make_unique<reference::Forward>(reference::attention_forward(data_.problem(), default_executor()));
  }
  return *forward_;
}

const CaseRunner::BackwardAnswer& CaseRunner::backward_answer() {
  if (!backward_) {
    const reference::Forward& forward = forward_reference();
    const Gradients gradients = data_.new_gradients();
    const AttentionBackwardProblem problem = data_.backward_problem(gradients);
    backward_ = std::make_unique<BackwardAnswer>(
        BackwardAnswer{reference::attention_backward(problem, default_executor()), plain_backward(problem, forward),
                       data_.new_o(), data_.new_lse()});
    fill(backward_->o, forward.o);
    fill(backward_->lse, forward.lse);
    if (device_ == Device::cuda) {
      // Products of f32 are those of two numbers of 11 bits each: a term is known to 22 bits, not 24.
      backward_->plain.dq.largest_term *= 4;
      backward_->plain.dk.largest_term *= 4;
    }
  }
  return *backward_;
}

CaseResult run_case(const AttentionCase& spec, Pass pass, const std::string& candidate, Executor* executor) {
  return CaseRunner(spec).check(pass, candidate, executor);
}

}  // namespace heddle::kit

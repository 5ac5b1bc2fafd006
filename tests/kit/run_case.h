// Runs candidates on a case through the public API and judges what they wrote.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "kit/case_data.h"
#include "kit/compare.h"
#include "kit/device_mirror.h"
#include "kit/yardstick.h"
#include "reference/attention.h"

namespace heddle::kit {

// What one candidate did on one case.
struct CaseResult {
  std::string case_name, candidate;
  Pass pass = Pass::forward;
  bool passed = false;
  std::vector<Comparison> tensors = {};
  std::string damage = {};               // not empty: memory outside an output was written
  std::vector<std::string> faults = {};  // what else is wrong, a sentence each
  double seconds = 0.0;                  // of the operation alone, one run, to its end
  // Why it failed, one line for each tensor; empty if it passed.
  std::string message() const;
};

// Fills result.tensors, .damage and .passed.
CaseResult judged_by(CaseResult result, const std::vector<Judged>& outputs);

// The candidates that support a call, without the reference.
std::vector<std::string> kernels_of(const std::vector<Candidate>& candidates);

template <class Operation>
double seconds_of(const Operation& operation) {
  const auto start = std::chrono::steady_clock::now();
  operation();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What the operation wrote, before any judgement.
struct ForwardOutputs {
  HostTensor o, lse;
  double seconds = 0.0;
};
struct BackwardOutputs {
  Gradients gradients;
  double seconds = 0.0;
};

// Which gradients a backward call asks for, of those that the case has.
struct Wanted {
  bool dq = true, dk = true, dv = true, dbias = true, dsink = true;
};

// A case with its answers: the reference and the plain computation run once, when they are first needed; any number of
// candidates (and SIMD targets, thread counts) are then judged by them. On a GPU the candidates read mirrors of the
// case's tensors and write mirrors of the outputs, which come back whole.
class CaseRunner {
 public:
  explicit CaseRunner(const AttentionCase& spec, std::uint64_t seed = 1, Device device = Device::cpu);

  const CaseData& data() const { return data_; }

  // What a call takes, on the runner's device.
  struct Inputs {
    TensorView q, k, v, d_o, d_lse;
    AttentionOptions options;
  };
  const Inputs& inputs() const { return inputs_; }
  // To ask the candidates for more than the case does: deterministic, batch_invariant.
  AttentionOptions& options() { return inputs_.options; }

  // What explain_attention says of this case.
  std::vector<Candidate> explain(Pass pass) const;
  std::vector<std::string> candidates(Pass pass) const { return kernels_of(explain(pass)); }

  // Runs `candidate` (null executor: the default one) to its end. The workspace is filled with `garbage` bytes before
  // the call.
  ForwardOutputs run_forward(const std::string& candidate, Executor* executor = nullptr, int garbage = 0xFF) const;
  // The same after a forward that wrote o and lse.
  BackwardOutputs run_backward_after(const HostTensor& o, const HostTensor& lse, const std::string& candidate,
                                     Executor* executor = nullptr, int garbage = 0xFF, const Wanted& wanted = {}) const;
  // o and lse are the reference's, rounded; under Precision::tf32, those of the free choice's forward.
  BackwardOutputs run_backward(const std::string& candidate, Executor* executor = nullptr, int garbage = 0xFF,
                               const Wanted& wanted = {});

  CaseResult check_forward(const std::string& candidate, Executor* executor = nullptr);
  CaseResult check_backward(const std::string& candidate, Executor* executor = nullptr, const Wanted& wanted = {});
  CaseResult check(Pass pass, const std::string& candidate, Executor* executor = nullptr);

  std::string blind_spots(Pass pass);

 private:
  struct BackwardAnswer {
    reference::Backward reference;
    PlainBackward plain;
    HostTensor o, lse;  // inputs of the backward
  };
  std::vector<Judged> judged(const ForwardOutputs& out);
  std::vector<Judged> judged(const BackwardOutputs& out);

  const reference::Forward& forward_reference();
  const BackwardAnswer& backward_answer();
  void mirror();

  CaseData data_;
  Device device_;
  std::vector<DeviceTensor> mirrors_;
  Inputs inputs_;
  std::unique_ptr<reference::Forward> forward_;
  std::unique_ptr<PlainForward> plain_;
  std::unique_ptr<BackwardAnswer> backward_;
};

// One case, one candidate.
CaseResult run_case(const AttentionCase& spec, Pass pass, const std::string& candidate, Executor* executor = nullptr);

}  // namespace heddle::kit

// Runs candidates on a case through the public API and judges what they wrote.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "kit/case_data.h"
#include "kit/compare.h"
#include "reference/attention.h"

namespace heddle::kit {

// What one candidate did on one case.
struct CaseResult {
  std::string case_name, candidate;
  Pass pass = Pass::forward;
  bool passed = false;
  std::vector<Comparison> tensors = {};
  std::string damage = {};  // not empty: memory outside an output was written
  double seconds = 0.0;     // of the operation alone, one run
  // Why it failed, one line for each tensor; empty if it passed.
  std::string message() const;
};

// What the operation wrote, before any judgement.
struct ForwardOutputs {
  HostTensor o, lse;
  double seconds = 0.0;
};
struct BackwardOutputs {
  Gradients gradients;
  double seconds = 0.0;
};

// A case with its answers: the reference and the plain computation run once, when they are first needed; any number of
// candidates (and SIMD targets, thread counts) are then judged by them.
class CaseRunner {
 public:
  explicit CaseRunner(const AttentionCase& spec, std::uint64_t seed = 1);

  const CaseData& data() const { return data_; }

  // The candidates that support this case, without the reference.
  std::vector<std::string> candidates(Pass pass) const;

  // Runs `candidate` (null executor: the default one). The workspace is filled with `garbage` bytes before the call.
  ForwardOutputs run_forward(const std::string& candidate, Executor* executor = nullptr, int garbage = 0xFF) const;
  // o and lse are the reference's, rounded.
  BackwardOutputs run_backward(const std::string& candidate, Executor* executor = nullptr, int garbage = 0xFF);

  CaseResult check_forward(const std::string& candidate, Executor* executor = nullptr);
  CaseResult check_backward(const std::string& candidate, Executor* executor = nullptr);
  CaseResult check(Pass pass, const std::string& candidate, Executor* executor = nullptr);

 private:
  struct ForwardAnswer {
    reference::Forward reference;
    PlainForward plain;
  };
  struct BackwardAnswer {
    reference::Backward reference;
    PlainBackward plain;
    HostTensor o, lse;  // inputs of the backward
  };
  const ForwardAnswer& forward_answer();
  const BackwardAnswer& backward_answer();

  CaseData data_;
  std::unique_ptr<ForwardAnswer> forward_;
  std::unique_ptr<BackwardAnswer> backward_;
};

// One case, one candidate.
CaseResult run_case(const AttentionCase& spec, Pass pass, const std::string& candidate, Executor* executor = nullptr);

}  // namespace heddle::kit

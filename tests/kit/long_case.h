// Long sequences, judged on some of their rows and keys: the reference and the plain computation are done for those
// alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kit/run_case.h"

namespace heddle::kit {

// One sequence, plain or causal, with no other option.
class LongCase {
 public:
  // `samples`: how many rows, and how many keys, are judged; spread over the sequence, its ends among them.
  LongCase(const AttentionCase& spec, std::int64_t samples, Device device = Device::cpu);

  std::vector<std::string> candidates(Pass pass) const { return runner_.candidates(pass); }
  // o and lse of the rows; dq of the rows, dk and dv of the keys.
  CaseResult check_forward(const std::string& candidate);
  // Only of a case that has one.
  CaseResult check_backward(const std::string& candidate);

 private:
  // A problem over rows first, first + step, ... of q, or keys of k and v; causality is a mask in it.
  struct Part {
    AttentionBackwardProblem problem;
    std::vector<unsigned char> mask;
  };
  Part rows_of(std::int64_t first, std::int64_t step, std::int64_t count) const;
  Part keys_of(std::int64_t first, std::int64_t step, std::int64_t count) const;
  void remove_pairs(Part& part) const;
  const reference::Forward& whole_forward();
  reference::Backward key_gradients(const Part& keys);

  CaseRunner runner_;
  Gradients gradients_;
  AttentionBackwardProblem problem_;
  std::int64_t samples_, row_step_, key_step_;
  std::unique_ptr<reference::Forward> whole_;
};

// Small enough for a CPU's tests; and as long as what is advertised for GPUs.
std::vector<AttentionCase> long_cases(bool small);

}  // namespace heddle::kit

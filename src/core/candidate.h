// How an operation's kernels present themselves to the dispatcher in src/ops.
#pragma once

#include <cstddef>
#include <string>

#include "core/attention_problem.h"

namespace heddle {

// Empty: supported. Otherwise the sentence that says why not.
using Refusal = std::string;

struct AttentionForwardKernel {
  const char* name;    // what `force` takes
  const char* method;  // "flash", "baseline", "reference"
  Device device;
  bool automatic;  // false: runs only when its method or name is asked for
  Refusal (*supports)(const AttentionProblem&);
  double (*estimate)(const AttentionProblem&, int workers);  // seconds
  std::size_t (*workspace)(const AttentionProblem&, int workers);
  void (*launch)(const AttentionProblem&, const Runtime&);  // runtime.executor and workspace are set and large enough
};

struct AttentionBackwardKernel {
  const char* name;
  const char* method;
  Device device;
  bool automatic;
  Refusal (*supports)(const AttentionBackwardProblem&);
  double (*estimate)(const AttentionBackwardProblem&, int workers);
  std::size_t (*workspace)(const AttentionBackwardProblem&, int workers);
  void (*launch)(const AttentionBackwardProblem&, const Runtime&);
};

}  // namespace heddle

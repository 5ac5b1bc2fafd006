// How an operation's kernels present themselves to the dispatcher in src/ops.
#pragma once

#include <cstddef>
#include <string>

#include "problem/attention.h"

namespace heddle {

// Empty: supported. Otherwise the sentence that says why not.
using Refusal = std::string;

// What a call may ask for and few kernels have; a candidate names those it knows, and is refused for the others.
enum Extra : unsigned {
  kE4m3 = 1,       // f8e4m3 operands
  kDraftMask = 2,  // draft_mask
  kAppend = 4,     // writing new keys into the cache in the same launch
  kInt4 = 8,       // a cache in 4 bits
  kInt8Qk = 16,    // Precision::int8_qk
};

struct AttentionForwardKernel {
  const char* name;    // what `force` takes
  const char* method;  // "flash", "baseline", "reference"
  Device device;
  bool automatic;  // false: runs only when its method or name is asked for
  Refusal (*supports)(const AttentionProblem&);
  double (*estimate)(const AttentionProblem&, int workers);  // seconds
  std::size_t (*workspace)(const AttentionProblem&, int workers);
  void (*launch)(const AttentionProblem&, const Runtime&);  // runtime.executor and workspace are set and large enough
  unsigned extras = 0;                                      // set of Extra
  bool for_decode = false;                                  // takes few queries a sequence only
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

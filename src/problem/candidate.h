// How a kernel presents itself to the choice (src/ops/choice.h), whatever its operation.
#pragma once

#include <cstddef>
#include <string>

#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

// Empty: supported. Otherwise the sentence that says why not.
using Refusal = std::string;

// Problem: a call of the operation after its arguments were checked.
template <class Problem>
struct Kernel {
  const char* name;    // what `force` takes
  const char* method;  // "flash", "baseline", "naive", "linear", "reference"
  Device device;
  bool automatic;                                         // false: runs only when its method or name is asked for
  Refusal (*supports)(const Problem&);                    // also of a GPU that is not here (cuda/assumed_gpu.h)
  double (*estimate)(const Problem&, int workers);        // seconds
  std::size_t (*workspace)(const Problem&, int workers);  // bytes
  void (*launch)(const Problem&, const Runtime&);         // runtime.executor and workspace are set and large enough
  unsigned extras = 0;      // what it knows of what few kernels do: a set of bits that the problem's header names
  bool for_decode = false;  // takes few queries a sequence only
};

}  // namespace heddle

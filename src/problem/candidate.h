// How a kernel presents itself to the choice (src/ops/choice.h), whatever its operation.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

// Empty: supported. Otherwise the sentence that says why not.
using Refusal = std::string;

// What an estimate is made of, as measured on an H200; `heddle tune` measures it on another GPU. What an estimate does
// not read of it is 0.
struct Cost {
  double fixed = 0;  // seconds of a call with next to nothing to compute
  double flops = 0;  // of products, a second, with every multiprocessor busy
  double bytes = 0;  // of keys and values, or of weights, read from memory, a second
};

// A cost by name, "sm90 d128", and the call that shows its rate: of bytes, if it has one, else of products.
template <class Problem>
struct CostLine {
  std::string_view name;
  Cost cost;
  typename Problem::Example example;
};

// Problem: a call of the operation after its arguments were checked. Problem::Example: such a call in short, where
// candidates are compared by costs that `heddle tune` measures; elsewhere a problem has none, and estimates rest on the
// bytes that are moved.
template <class Problem>
struct Kernel {
  const char* name;    // what `force` takes
  const char* method;  // as heddle/candidate.h lists them
  Device device;
  bool automatic;                                         // false: runs only when its method or name is asked for
  Refusal (*supports)(const Problem&);                    // also of a GPU that is not here (cuda/assumed_gpu.h)
  double (*estimate)(const Problem&, int workers);        // seconds
  std::size_t (*workspace)(const Problem&, int workers);  // bytes
  void (*launch)(const Problem&, const Runtime&);         // runtime.executor and workspace are set and large enough
  std::string (*describe)(const Problem&, int workers);   // what launch() would run, in words: variant, tiles, splits
  unsigned extras = 0;      // what it knows of what few kernels do: a set of bits that the problem's header names
  bool for_decode = false;  // takes few queries a sequence only
  // What `estimate` rests on, of a GPU's kernel whose problem has examples.
  std::span<const CostLine<Problem>> costs = {};
};

// Kernel::supports and Kernel::workspace of those that take every call that was checked, and no workspace.
template <class Problem>
Refusal serves_all(const Problem&) {
  return "";
}
template <class Problem>
std::size_t no_workspace(const Problem&, int) {
  return 0;
}

}  // namespace heddle

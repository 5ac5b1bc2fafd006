// Which candidate runs, and why: one rule for all operations that have several.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/runtime.h"
#include "cuda/assumed_gpu.h"
#include "cuda/backend.h"
#include "cuda/kernels.h"
#include "heddle/candidate.h"
#include "problem/candidate.h"

namespace heddle {

// What the choice asks of an operation, each of which specialises this for its problem in a header of src/ops.
template <class Problem>
struct Operation {
  // All of them, in the order in which they are listed.
  static std::span<const Kernel<Problem>* const> candidates();
  static Device device(const Problem& problem);
  // What the call asks for and a kernel with these extras does not do, in words; empty if nothing.
  static Refusal missing(unsigned extras, const Problem& problem);
  // Kernel -> pair(comes last, seconds), of kernels that can serve the call: the least is chosen.
  static auto ranking(const Problem& problem, int workers);
};

// One whose candidates do all that can be asked, and are compared by their estimates alone.
template <class Problem>
struct PlainOperation {
  static std::span<const Kernel<Problem>* const> candidates();
  static Device device(const Problem& problem) { return problem.device; }
  static Refusal missing(unsigned, const Problem&) { return ""; }
  static auto ranking(const Problem& problem, int workers) {
    return [&problem, workers](const Kernel<Problem>& kernel) {
      return std::pair(false, kernel.estimate(problem, workers));
    };
  }
};

// The CPU's kernels, and then the GPU's.
template <class Problem>
std::vector<const Kernel<Problem>*> with_gpu_kernels(std::vector<const Kernel<Problem>*> kernels) {
  cuda::add_kernels(kernels);
  return kernels;
}

// What the caller leaves a choice of. Both empty: every candidate that is `automatic`.
struct Wish {
  std::string method, force;
  const char* force_name = "force";  // who asks for `force`, in errors

  template <class Problem>
  bool admits(const Kernel<Problem>& kernel) const {
    if (!force.empty()) return force == kernel.name;
    if (!method.empty()) return method == kernel.method;
    return kernel.automatic;
  }
};

// Whether any operation has a candidate of this name.
bool names_a_kernel(std::string_view name);

template <class Problem>
std::string names_of_candidates() {
  std::string names;
  for (const Kernel<Problem>* kernel : Operation<Problem>::candidates()) {
    if (!names.empty()) names += ", ";
    names += kernel->name;
  }
  return names;
}

// Of the call's options. Where they name no candidate HEDDLE_KERNEL may, for the operations that have one of its name.
template <class Problem>
Wish wish_of(const Check& check, const std::string& force, const std::string& method = "") {
  Wish wish{method, force};
  const char* name = force.empty() ? std::getenv("HEDDLE_KERNEL") : nullptr;
  if (name == nullptr || *name == '\0') return wish;
  const auto has = [&](const Kernel<Problem>* kernel) { return kernel->name == std::string_view(name); };
  if (std::ranges::any_of(Operation<Problem>::candidates(), has)) {
    wish.force = name;
    wish.force_name = "HEDDLE_KERNEL";
  } else {
    check.require(names_a_kernel(name), "HEDDLE_KERNEL is '", name,
                  "', which no operation has; here the candidates are ", names_of_candidates<Problem>());
  }
  return wish;
}

// Why `kernel` cannot serve the call, whoever asks for it; empty if it can.
template <class Problem>
Refusal inability(const Kernel<Problem>& kernel, const Problem& problem) {
  if (kernel.device == Device::cuda && !cuda::built()) return kernel.supports(problem);  // wherever the tensors are
  if (kernel.device != Operation<Problem>::device(problem)) return "it runs on another device than the tensors are on";
  Refusal reason = Operation<Problem>::missing(kernel.extras, problem);
  return reason.empty() ? kernel.supports(problem) : reason;
}

// Why it may not run for this call; empty if it may.
template <class Problem>
Refusal refusal(const Kernel<Problem>& kernel, const Problem& problem, const Wish& wish) {
  if (Refusal reason = inability(kernel, problem); !reason.empty()) return reason;
  if (wish.admits(kernel)) return "";
  if (!wish.force.empty()) return "another candidate was asked for by name";
  if (!wish.method.empty()) return "another method was asked for";
  return "it runs only when it is asked for";
}

// The candidate that serves the call; null if none can.
template <class Problem>
const Kernel<Problem>* find(const Problem& problem, const Wish& wish, int workers) {
  const auto ranked = Operation<Problem>::ranking(problem, workers);
  const Kernel<Problem>* best = nullptr;
  std::pair<bool, double> best_rank;
  for (const Kernel<Problem>* kernel : Operation<Problem>::candidates()) {
    // As refusal(), without the sentences that cost time.
    if (kernel->device != Operation<Problem>::device(problem) || !wish.admits(*kernel)) continue;
    if (!inability(*kernel, problem).empty()) continue;
    const std::pair<bool, double> rank = ranked(*kernel);
    if (best == nullptr || rank < best_rank) {
      best = kernel;
      best_rank = rank;
    }
  }
  return best;
}

// Throws what the candidate that was asked for by name has to say, or each that might have served. Apart from choose(),
// whose time counts in each call.
template <class Problem>
[[noreturn]] void refuse(const Check& check, const Problem& problem, const Wish& wish) {
  std::string reasons;
  for (const Kernel<Problem>* kernel : Operation<Problem>::candidates()) {
    const Refusal reason = refusal(*kernel, problem, wish);
    check.require(wish.force != kernel->name, wish.force_name, " is '", wish.force,
                  "', which cannot serve this call: ", reason);
    if (kernel->device != Operation<Problem>::device(problem)) continue;  // it could not, whatever the call asks for
    if (wish.method.empty() || wish.method == kernel->method) reasons += text("; ", kernel->name, ": ", reason);
  }
  check.require(wish.force.empty(), wish.force_name, " is '", wish.force, "': the candidates are ",
                names_of_candidates<Problem>());
  check.require(false, "no candidate ", wish.method.empty() ? "" : text("of method '", wish.method, "' "),
                "can serve this call", reasons);
  std::abort();  // not reached: require() throws
}

template <class Problem>
const Kernel<Problem>& choose(const Check& check, const Problem& problem, const Wish& wish, int workers) {
  const Kernel<Problem>* const best = find(problem, wish, workers);
  if (best == nullptr) refuse(check, problem, wish);
  return *best;
}

// What explain_*() answers.
template <class Problem>
std::vector<Candidate> explained(const Problem& problem, const Wish& wish, int workers) {
  std::vector<Candidate> list;
  const Kernel<Problem>* const best = find(problem, wish, workers);
  for (const Kernel<Problem>* kernel : Operation<Problem>::candidates()) {
    Candidate& candidate = list.emplace_back();
    candidate.name = kernel->name;
    candidate.method = kernel->method;
    candidate.device = kernel->device;
    candidate.reason = refusal(*kernel, problem, wish);
    candidate.supported = inability(*kernel, problem).empty();
    if (candidate.supported) {
      candidate.seconds = kernel->estimate(problem, workers);
      candidate.workspace = kernel->workspace(problem, workers);
      candidate.plan = kernel->describe(problem, workers);
    }
    candidate.chosen = kernel == best;
  }
  return list;
}

// Launches over a workspace of `needed` bytes, which is checked. operation: as errors name it.
template <class Problem>
void run(const Check& check, const char* operation, const Kernel<Problem>& kernel, const Problem& problem,
         const Runtime& given, std::size_t needed) {
  if (kernel.device == Device::cuda) cuda::require_gpu_that_is_here(operation);
  Runtime runtime = given;
  runtime.executor = &executor_of(given);
  check_workspace(check, runtime.workspace, needed);
  kernel.launch(problem, runtime);
}

}  // namespace heddle

// Which candidate runs for a linear layer, or for its gradients.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "cuda/backend.h"
#include "heddle/candidate.h"
#include "problem/linear.h"

namespace heddle {

inline const LinearProblem& forward_of(const LinearProblem& problem) { return problem; }
inline const LinearProblem& forward_of(const LinearBackwardProblem& problem) { return problem.forward; }

// Why a candidate cannot serve this call; empty if it can.
template <class Problem>
std::string inability(const LinearCandidate<Problem>& kernel, const Problem& problem) {
  if (kernel.device == Device::cuda && !cuda::built()) return kernel.supports(problem);  // wherever the tensors are
  if (kernel.device != forward_of(problem).device) return "it runs on another device than the tensors are on";
  if (forward_of(problem).norm.kind != Norm::none && !kernel.norms) return "it has no norm in front of the product";
  return kernel.supports(problem);
}

// Whether it is among those that the call leaves a choice of.
template <class Problem>
bool asked_for(const LinearCandidate<Problem>& kernel, const std::string& force) {
  return force.empty() ? kernel.automatic : force == kernel.name;
}

// Why it may not run for this call; empty if it may.
template <class Problem>
std::string refusal(const LinearCandidate<Problem>& kernel, const Problem& problem, const std::string& force) {
  if (std::string reason = inability(kernel, problem); !reason.empty()) return reason;
  if (asked_for(kernel, force)) return "";
  return force.empty() ? "it runs only when it is asked for by name" : "another candidate was asked for by name";
}

template <class Problem, std::size_t kCount>
const LinearCandidate<Problem>& choose(const Check& check, const LinearCandidate<Problem>* const (&candidates)[kCount],
                                       const Problem& problem, const std::string& force, int workers) {
  const LinearCandidate<Problem>* best = nullptr;
  double best_seconds = 0;
  for (const LinearCandidate<Problem>* kernel : candidates) {
    const bool here = kernel->device == forward_of(problem).device;
    if (!here || !asked_for(*kernel, force)) continue;  // as refusal(), without sentences
    if (!inability(*kernel, problem).empty()) continue;
    const double seconds = kernel->estimate(problem, workers);
    if (best == nullptr || seconds < best_seconds) {
      best = kernel;
      best_seconds = seconds;
    }
  }
  if (best != nullptr) return *best;
  std::string reasons, names;
  for (const LinearCandidate<Problem>* kernel : candidates) {
    const std::string reason = refusal(*kernel, problem, force);
    check.require(force != kernel->name, "force is '", force, "', which cannot serve this call: ", reason);
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    reasons += text("; ", kernel->name, ": ", reason);
  }
  check.require(force.empty(), "force is '", force, "': the candidates are ", names);
  check.require(false, "no candidate can serve this call", reasons);
  return **candidates;
}

template <class Problem, std::size_t kCount>
std::vector<Candidate> explained(const LinearCandidate<Problem>* const (&candidates)[kCount], const Problem& problem,
                                 const std::string& force, int workers) {
  std::vector<Candidate> list;
  Candidate* best = nullptr;
  list.reserve(kCount);
  for (const LinearCandidate<Problem>* kernel : candidates) {
    Candidate& c = list.emplace_back();
    c.name = kernel->name;
    c.method = kernel->method;
    c.device = kernel->device;
    c.reason = refusal(*kernel, problem, force);
    c.supported = inability(*kernel, problem).empty();
    if (!c.supported) continue;
    c.seconds = kernel->estimate(problem, workers);
    c.workspace = kernel->workspace(problem, workers);
    if (c.reason.empty() && (best == nullptr || c.seconds < best->seconds)) best = &c;
  }
  if (best != nullptr) best->chosen = true;
  return list;
}

}  // namespace heddle

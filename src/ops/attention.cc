// attention_forward, attention_backward and explain_attention: check, ask each candidate, choose, launch.
#include "ops/attention.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>

#include "cpu/attention.h"
#include "cuda/assumed_gpu.h"
#include "cuda/attention.h"
#include "cuda/backend.h"
#include "ops/attention_arguments.h"
#include "ops/validate.h"
#include "problem/candidate.h"
#include "reference/attention.h"

namespace heddle {
namespace {

std::span<const AttentionForwardKernel* const> candidates(const AttentionProblem*) {
  static const AttentionForwardKernel* const kernels[] = {
      &cpu::kAttentionForward,          &cpu::kAttentionForwardBaseline,  &reference::kAttentionForward,
      &cuda::kSm90AttentionForward,     &cuda::kSm90AttentionForwardFp8,  &cuda::kSm90AttentionDecode,
      &cuda::kSm80AttentionForward,     &cuda::kSm80AttentionForwardInt8, &cuda::kSm80AttentionDecode,
      &cuda::kAttentionForwardBaseline, &cuda::kNaiveAttentionForward,
  };
  return kernels;
}

std::span<const AttentionBackwardKernel* const> candidates(const AttentionBackwardProblem*) {
  static const AttentionBackwardKernel* const kernels[] = {&cpu::kAttentionBackward, &reference::kAttentionBackward,
                                                           &cuda::kSm90AttentionBackward,
                                                           &cuda::kSm80AttentionBackward};
  return kernels;
}

struct Wish {
  std::string method, force;
  const char* force_name = "force";  // who asks

  Wish(const Check& check, const AttentionOptions& options) : method(options.method), force(options.force) {
    check.require(method.empty() || method == "flash" || method == "baseline", "method is '", method,
                  "': it must be 'flash', 'baseline' or empty for a free choice");
    if (const char* name = std::getenv("HEDDLE_KERNEL"); force.empty() && name != nullptr) {
      force = name;
      force_name = "HEDDLE_KERNEL";
    }
  }
};

// Extras that the call asks for and `kernel` does not know, in words.
Refusal missing_extra(const AttentionForwardKernel& kernel, const AttentionProblem& p) {
  const auto lacks = [&](Extra extra) { return (kernel.extras & extra) == 0; };
  if (p.k.dtype == DType::f8e4m3 && lacks(kE4m3)) return "it does not read float8_e4m3fn";
  if (p.int4 && lacks(kInt4)) return "it does not read a cache in 4 bits";
  if (p.draft_mask && lacks(kDraftMask)) return "it has no draft_mask";
  if (p.append && lacks(kAppend)) return "it does not append keys";
  if (p.precision == Precision::int8_qk && lacks(kInt8Qk)) return "it does not multiply q and k in 8 bits (int8_qk)";
  return "";
}
Refusal missing_extra(const AttentionBackwardKernel&, const AttentionBackwardProblem&) { return ""; }

// Why `kernel` cannot serve this problem.
template <class Kernel, class Problem>
Refusal unsupported(const Kernel& kernel, const Problem& problem) {
  Refusal reason = missing_extra(kernel, problem);
  return reason.empty() ? kernel.supports(problem) : reason;
}

// Whether `kernel` is among those that the call leaves a choice of.
template <class Kernel>
bool asked_for(const Kernel& kernel, const Wish& wish) {
  if (!wish.force.empty()) return wish.force == kernel.name;
  if (!wish.method.empty()) return wish.method == kernel.method;
  return kernel.automatic;
}

// Why a candidate may not run for this call; empty if it may.
template <class Kernel, class Problem>
Refusal refusal(const Kernel& kernel, const Problem& problem, Device device, const Wish& wish) {
  if (kernel.device == Device::cuda && !cuda::built()) return kernel.supports(problem);  // wherever the tensors are
  if (kernel.device != device) return "it runs on another device than the tensors are on";
  if (Refusal reason = unsupported(kernel, problem); !reason.empty()) return reason;
  if (asked_for(kernel, wish)) return "";
  if (!wish.force.empty()) return "another candidate was asked for by name";
  if (!wish.method.empty()) return "another method was asked for";
  return "it runs only when it is asked for by name or method";
}

// Throws what the candidate that was asked for by name has to say, or each that might have served. Apart from choose(),
// whose time counts in each call.
template <class Problem>
[[noreturn]] void refuse(const Check& check, const Problem& problem, Device device, const Wish& wish) {
  std::string reasons, names;
  for (const auto* kernel : candidates(&problem)) {
    const Refusal reason = refusal(*kernel, problem, device, wish);
    check.require(wish.force != kernel->name, wish.force_name, " is '", wish.force,
                  "', which cannot serve this call: ", reason);
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    if (wish.method.empty() || wish.method == kernel->method) reasons += text("; ", kernel->name, ": ", reason);
  }
  check.require(wish.force.empty(), wish.force_name, " is '", wish.force, "': the candidates are ", names);
  check.require(false, "no candidate ", wish.method.empty() ? "" : text("of method '", wish.method, "' "),
                "can serve this call", reasons);
  std::abort();  // not reached: require() throws
}

// Calls of up to so many queries a sequence are decode, and may be chosen for by their batch.
constexpr std::int64_t kMostDecodeQueries = 16;

bool sees_batch(const AttentionProblem& p) { return p.Sq <= kMostDecodeQueries && !p.batch_invariant; }
bool sees_batch(const AttentionBackwardProblem&) { return false; }

// What estimates are asked for when candidates are compared. Two candidates give a row different bits, so where these
// may not depend on the row's neighbours the choice does not either: the batch is one that keeps any GPU busy, and
// packed sequences have one length, whatever the longest has.
template <class Problem>
Problem as_compared(const Problem& problem) {
  constexpr std::int64_t kBatch = 1024, kPackedLength = 4096;
  Problem p = problem;
  p.B = kBatch;
  if (p.cu_seqlens_q && p.Sq > 0) p.Sq = kPackedLength;
  if (p.cu_seqlens_k && p.Sk > 0) p.Sk = kPackedLength;
  return p;
}

// Whether `kernel` is for when no other serves: a packed sequence must get the same kernel beside a long one, which
// decode kernels do not take.
bool comes_last(const AttentionForwardKernel& kernel, const AttentionProblem& p) {
  return kernel.for_decode && p.cu_seqlens_q && !sees_batch(p);
}
bool comes_last(const AttentionBackwardKernel&, const AttentionBackwardProblem&) { return false; }

// Null: none can serve the call.
template <class Problem>
auto find(const Problem& problem, Device device, const Wish& wish, int workers) {
  const auto kernels = candidates(&problem);
  // On the CPU one candidate of each method runs by itself, and estimates may read index data.
  const bool by_batch = device == Device::cpu || sees_batch(problem);
  const std::optional<Problem> compared = by_batch ? std::nullopt : std::optional(as_compared(problem));
  std::remove_cvref_t<decltype(kernels[0])> best = nullptr;
  std::pair<bool, double> best_rank;  // the smallest is best
  for (const auto* kernel : kernels) {
    if (kernel->device != device || !asked_for(*kernel, wish)) continue;  // as refusal(), without sentences
    if (!unsupported(*kernel, problem).empty()) continue;
    const std::pair rank(comes_last(*kernel, problem), kernel->estimate(compared ? *compared : problem, workers));
    if (best == nullptr || rank < best_rank) {
      best = kernel;
      best_rank = rank;
    }
  }
  return best;
}

template <class Problem>
auto choose(const Check& check, const Problem& problem, Device device, const Wish& wish, int workers) {
  const auto best = find(problem, device, wish, workers);
  if (best == nullptr) refuse(check, problem, device, wish);
  return best;
}

template <class Kernel, class Problem>
void run(const Check& check, const Kernel& kernel, const Problem& problem, const Runtime& given, std::size_t needed) {
  if (kernel.device == Device::cuda) cuda::require_gpu_that_is_here("attention");
  Runtime runtime = given;
  if (runtime.executor == nullptr) runtime.executor = &default_executor();
  check_workspace(check, runtime.workspace, needed);
  kernel.launch(problem, runtime);
}

void validate(const char* operation, const AttentionProblem& problem, const Runtime& runtime) {
  if (validates(runtime, problem.device)) {
    cuda::check_indices(operation, AttentionIndices{problem, KeyNames()}, runtime.stream);
  }
}

template <class Problem>
std::vector<Candidate> explain(const Problem& problem, Device device, const Wish& wish, int workers) {
  std::vector<Candidate> list;
  const auto best = find(problem, device, wish, workers);
  for (const auto* kernel : candidates(&problem)) {
    Candidate candidate;
    candidate.name = kernel->name;
    candidate.method = kernel->method;
    candidate.device = kernel->device;
    candidate.reason = refusal(*kernel, problem, device, wish);
    candidate.supported = kernel->device == device && unsupported(*kernel, problem).empty();
    if (candidate.supported) {
      candidate.seconds = kernel->estimate(problem, workers);
      candidate.workspace = kernel->workspace(problem, workers);
    }
    candidate.chosen = kernel == best;
    list.push_back(candidate);
  }
  return list;
}

}  // namespace

void check_workspace(const Check& check, const Workspace& workspace, std::size_t needed) {
  check.require(workspace.bytes >= needed && (needed == 0 || workspace.data != nullptr), "the workspace has ",
                workspace.bytes, " bytes: this call needs ", needed, "; ask the operation's workspace query");
  check.require(reinterpret_cast<std::uintptr_t>(workspace.data) % 64 == 0,
                "the workspace must be aligned to 64 bytes");
}

int workers_of(const Runtime& runtime) {
  return runtime.executor != nullptr ? runtime.executor->workers() : default_executor().workers();
}

const AttentionForwardKernel* find_forward(const Check& check, const AttentionProblem& problem,
                                           const AttentionOptions& options, int workers) {
  return find(problem, problem.device, Wish(check, options), workers);
}

const AttentionForwardKernel& choose_forward(const Check& check, const AttentionProblem& problem,
                                             const AttentionOptions& options, int workers) {
  return *choose(check, problem, problem.device, Wish(check, options), workers);
}

std::vector<Candidate> explain_forward(const Check& check, const AttentionProblem& problem,
                                       const AttentionOptions& options, int workers) {
  return explain(problem, problem.device, Wish(check, options), workers);
}

void run_forward(const Check& check, const AttentionForwardKernel& kernel, const AttentionProblem& problem,
                 const Runtime& runtime, std::size_t needed) {
  run(check, kernel, problem, runtime, needed);
}

std::size_t attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                        const AttentionOptions& options, const Runtime& runtime) {
  const Check check("attention_forward");
  const AttentionProblem problem = checked_forward_problem(check, q, k, v, {}, {}, options);
  const int workers = workers_of(runtime);
  return choose(check, problem, q.device, Wish(check, options), workers)->workspace(problem, workers);
}

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                       const TensorView& lse, const AttentionOptions& options, const Runtime& runtime) {
  attention_forward_with(q, k, v, o, lse, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

void attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                            const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                            const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("attention_forward");
  check.require(o.given(), "o is missing");
  const AttentionProblem problem = checked_forward_problem(check, q, k, v, o, lse, options);
  const int workers = workers_of(runtime);
  const AttentionForwardKernel& kernel = *choose(check, problem, q.device, Wish(check, options), workers);
  const std::size_t needed = kernel.workspace(problem, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  validate("attention_forward", problem, with);
  run(check, kernel, problem, with, needed);
}

std::size_t attention_backward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionGradients& gradients, const AttentionOptions& options,
                                         const Runtime& runtime) {
  const Check check("attention_backward");
  const AttentionBackwardProblem problem = checked_backward_problem(check, q, k, v, {}, {}, {}, {}, gradients, options);
  const int workers = workers_of(runtime);
  const Wish wish(check, options);
  // Which candidate runs may depend on how o and d_o lie, which is not known here: enough for each that may.
  std::size_t bytes = choose(check, problem, q.device, wish, workers)->workspace(problem, workers);
  for (const AttentionBackwardKernel* kernel : candidates(&problem)) {
    if (refusal(*kernel, problem, q.device, wish).empty()) bytes = std::max(bytes, kernel->workspace(problem, workers));
  }
  return bytes;
}

void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                        const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                        const AttentionGradients& gradients, const AttentionOptions& options, const Runtime& runtime) {
  attention_backward_with(q, k, v, o, lse, d_o, d_lse, gradients, options, runtime,
                          [&](std::size_t) { return runtime.workspace; });
}

void attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const AttentionGradients& gradients, const AttentionOptions& options,
                             const Runtime& runtime, const std::function<Workspace(std::size_t bytes)>& scratch) {
  const Check check("attention_backward");
  check.require(o.given(), "o is missing");
  check.require(lse.given(), "lse is missing: attention_forward writes it");
  check.require(d_o.given(), "d_o is missing");
  const AttentionBackwardProblem problem =
      checked_backward_problem(check, q, k, v, o, lse, d_o, d_lse, gradients, options);
  const int workers = workers_of(runtime);
  const AttentionBackwardKernel& kernel = *choose(check, problem, q.device, Wish(check, options), workers);
  const std::size_t needed = kernel.workspace(problem, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  validate("attention_backward", problem, with);
  run(check, kernel, problem, with, needed);
}

std::vector<Candidate> explain_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                         const AttentionOptions& options, Pass pass, const Runtime& runtime) {
  const Check check("explain_attention");
  const int workers = workers_of(runtime);
  if (pass == Pass::forward) {
    return explain_forward(check, checked_forward_problem(check, q, k, v, {}, {}, options), options, workers);
  }
  return explain(checked_backward_problem(check, q, k, v, {}, {}, {}, {}, {}, options), q.device, Wish(check, options),
                 workers);
}

}  // namespace heddle

// Cases of attention with a tolerance, and what a candidate's results are held against: the reference for the very
// blocks that it replaced, and exact attention.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "heddle/adaptive.h"
#include "kit/cases.h"
#include "kit/run_case.h"
#include "kit/yardstick.h"
#include "problem/adaptive.h"
#include "reference/adaptive.h"
#include "reference/attention.h"

namespace heddle::kit {

struct AdaptiveCase {
  const char* name;
  float tol;
  AttentionCase call;

  // Kernels have no gradients with ALiBi or softcap.
  bool has_gradients() const { return call.has_backward() && call.alibi == Alibi::none && call.softcap == 0; }
};
inline void PrintTo(const AdaptiveCase& spec, std::ostream* out) { *out << spec.name; }
const std::vector<AdaptiveCase>& adaptive_cases();
AttentionCase adaptive_call(DType dtype, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq,
                            std::int64_t Sk, std::int64_t D, void (*change)(AttentionCase&) = nullptr);

// Poisoned and guarded outputs.
struct AdaptiveResult {
  HostTensor o, lse, bound, replaced;
  explicit AdaptiveResult(const CaseData& data);

  AdaptiveOutputs views() const { return {o.view(), lse.view(), bound.view(), replaced.view()}; }
  std::int64_t blocks_replaced() const;
  bool same_bits(const AdaptiveResult& other) const;
};
AdaptiveResult run_adaptive(const CaseData& data, float tol, const std::string& candidate,
                            Executor* executor = nullptr);
// o, lse and replaced: as a forward wrote them.
Gradients run_adaptive_backward(const CaseData& data, const AdaptiveResult& after, const std::string& candidate,
                                Executor* executor = nullptr);

// The problems of a call and its gradients, over `result`'s blocks.
AdaptiveProblem adaptive_problem(const CaseData& data, float tol, const AdaptiveResult& result);
AdaptiveBackwardProblem adaptive_backward_problem(const CaseData& data, const AdaptiveResult& after,
                                                  const Gradients& gradients);

// Judges what candidates make of one case, which must outlive it.
class AdaptiveJudge {
 public:
  explicit AdaptiveJudge(const CaseData& data);

  // A forward's results: o and lse are those of its blocks, by the accuracy rule; each row is within bound * longest
  // value of exact attention, beside that rule; bound is at most tol, and near what the reference finds for these
  // blocks.
  CaseResult judge(float tol, const AdaptiveResult& result, const std::string& candidate = "cpu") const;
  // Gradients: those of what was computed.
  CaseResult judge(const AdaptiveResult& after, const Gradients& gradients, const std::string& candidate = "cpu");

 private:
  const CaseData& data_;
  const reference::Forward exact_;
  const PlainForward plain_;
  const double factor_;
  std::unique_ptr<reference::Backward> exact_backward_;
  std::unique_ptr<PlainBackward> plain_backward_;
};
// `result` with o and lse as the reference has them for its blocks.
AdaptiveResult exact_for_blocks(const CaseData& data, float tol, AdaptiveResult result);

}  // namespace heddle::kit

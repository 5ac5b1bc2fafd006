// Cases of attention over lists of key blocks: a call, its lists, and the mask that says the same as they.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kit/block_lists.h"
#include "kit/cases.h"
#include "kit/run_case.h"
#include "problem/sparse.h"
#include "reference/attention.h"

namespace heddle::kit {

struct SparseCase {
  const char* name;
  ListShape lists;
  AttentionCase call;  // with a mask that CaseLists::write_mask() fills, unless it has steps, which take none

  // Candidates have no gradients with ALiBi or softcap.
  bool has_gradients() const { return call.has_backward() && call.alibi == Alibi::none && call.softcap == 0; }
};
const std::vector<SparseCase>& sparse_cases();
AttentionCase sparse_call(DType dtype, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq,
                          std::int64_t Sk, std::int64_t D, void (*change)(AttentionCase&) = nullptr);

// The case's options without the mask, which the lists say in its place.
AttentionOptions sparse_options(const CaseData& data, const std::string& candidate = "");
ForwardOutputs run_sparse(const CaseData& data, const BlockLists& lists, const std::string& candidate,
                          Executor* executor = nullptr);
// After a forward that wrote o and lse.
BackwardOutputs run_sparse_backward(const CaseData& data, const BlockLists& lists, const HostTensor& o,
                                    const HostTensor& lse, const std::string& candidate, Executor* executor = nullptr);

// A case with its answers: those of attention under the mask.
class SparseRunner {
 public:
  explicit SparseRunner(const SparseCase& spec);

  CaseData data;
  const CaseLists lists;

  std::vector<std::string> candidates(Pass pass) const;
  CaseResult check(Pass pass, const std::string& candidate, Executor* executor = nullptr);
  // What `candidate` wrote, wherever it ran.
  CaseResult judge(const ForwardOutputs& out, const std::string& candidate);
  CaseResult judge(const BackwardOutputs& out, const std::string& candidate);
  std::string blind_spots(Pass pass);

  // Of the call, for gradients in tensors of its own.
  SparseProblem problem() const;
  SparseBackwardProblem backward_problem(const Gradients& gradients);
  const reference::Forward& forward();
  const reference::Backward& backward();
  // o and lse of forward(), rounded, as a backward takes them.
  const ForwardOutputs& rounded_forward();

 private:
  std::vector<Judged> judged(const ForwardOutputs& out);
  std::vector<Judged> judged(const BackwardOutputs& out);

  std::string name_;
  CaseData masked_;  // the call of attention that says the same
  std::unique_ptr<reference::Forward> forward_;
  std::unique_ptr<reference::Backward> backward_;
  std::unique_ptr<ForwardOutputs> rounded_;
  std::unique_ptr<PlainForward> plain_forward_;
  std::unique_ptr<PlainBackward> plain_backward_;
};

}  // namespace heddle::kit

// Cases of merge_attention and its gradients: partial results of every kind, and what the reference in doubles makes of
// them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/partial.h"
#include "kit/host_tensor.h"
#include "kit/run_case.h"
#include "problem/partial.h"

namespace heddle::kit {

struct MergeCase {
  const char* name;
  DType dtype;
  std::size_t partials;
  bool packed, sink, d_lse, strided;
  std::int64_t B, S, H, Dv;
};
const std::vector<MergeCase>& merge_cases();

// Rows of every kind: all parts with keys, some without, one alone, and none.
class MergeData {
 public:
  explicit MergeData(const MergeCase& spec);
  MergeData(const MergeData&) = delete;  // partials are views of its own tensors

  HostTensor rows(DType dtype, bool output = true) const;
  HostTensor per_row(bool output = true) const;
  MergeProblem problem() const;
  MergeBackwardProblem backward_problem(const std::vector<Partial>& gradients) const;

  const MergeCase s;
  std::vector<Partial> partials;
  HostTensor sink, d_o, d_lse;

 private:
  HostTensor tensor(DType dtype, std::vector<std::int64_t> shape, bool output) const;

  std::vector<HostTensor> o_, lse_;
};

// What one candidate writes, judged. o_dtype: of o, f32 or the partials'.
CaseResult check_merge(const MergeData& data, const std::string& candidate, DType o_dtype);
CaseResult check_merge_backward(const MergeData& data, const std::string& candidate);
// Those of the case but the reference.
std::vector<std::string> merge_candidates(const MergeData& data, Pass pass);

}  // namespace heddle::kit

// Cases of merge_attention and its gradients: partial results of every kind, and what the reference in doubles makes of
// them.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
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
  bool packed, sink, d_lse;
  Layout layout;
  std::int64_t B, S, H, Dv;
};
void PrintTo(const MergeCase& c, std::ostream* out);

const std::vector<MergeCase>& merge_cases();
const MergeCase& merge_case(std::string_view name);

// Rows of every kind: all parts with keys, some without, one alone, and none.
class MergeData {
 public:
  // d_o_dtype: f32 or the partials'.
  explicit MergeData(const MergeCase& spec, DType d_o_dtype = DType::f32);
  MergeData(const MergeData&) = delete;  // partials are views of its own tensors

  HostTensor rows(DType dtype, bool output = true) const;
  HostTensor per_row(bool output = true) const;
  MergeProblem problem() const;
  MergeBackwardProblem backward_problem(const std::vector<Partial>& gradients) const;

  const MergeCase s;
  std::vector<HostTensor> os, lses;
  std::vector<Partial> partials;
  HostTensor sink, d_o, d_lse;

 private:
  HostTensor tensor(DType dtype, std::vector<std::int64_t> shape, bool output) const;
};

// The dtypes that o may have.
std::vector<DType> merged_dtypes(const MergeCase& spec);
// What one candidate writes, judged.
CaseResult check_merge(const MergeData& data, const std::string& candidate, DType o_dtype);
CaseResult check_merge_backward(const MergeData& data, const std::string& candidate);
// Those of the case but the reference.
std::vector<std::string> merge_candidates(const MergeData& data, Pass pass);

}  // namespace heddle::kit

// What bindings and tests call beside the public API of partial results.
#pragma once

#include <cstddef>
#include <functional>

#include "core/check.h"
#include "ops/attention/attention.h"
#include "problem/partial.h"

namespace heddle {

struct GpuModel;  // heddle/explain.h

// What errors call the tensors: those of partial n as o[0] n o[1], so "partials[2].o".
struct MergeNames {
  const char *o[2] = {"partials[", "].o"}, *lse[2] = {"partials[", "].lse"};
  OutputNames outputs = {};
};

// Checked arguments; the spans are the caller's. o may be absent where only the problem is wanted.
MergeProblem checked_merge_problem(const Check& check, std::span<const Partial> partials, const TensorView& sink,
                                   const TensorView& o, const TensorView& lse, const MergeNames& names = {});
MergeBackwardProblem checked_merge_backward_problem(const Check& check, std::span<const Partial> partials,
                                                    const TensorView& sink, const TensorView& d_o,
                                                    const TensorView& d_lse, std::span<const Partial> gradients,
                                                    const TensorView& dsink, const MergeNames& names = {});

// merge_attention() and merge_attention_backward() with names for errors, and scratch that is asked for when the kernel
// is chosen (ops/attention/attention.h); and what explains the first, with names.
void merge_attention_with(const MergeNames& names, std::span<const Partial> partials, const TensorView& o,
                          const TensorView& lse, const MergeOptions& options, const Runtime& runtime,
                          const std::function<Workspace(std::size_t bytes)>& scratch);
void merge_attention_backward_with(const MergeNames& names, std::span<const Partial> partials, const TensorView& d_o,
                                   const TensorView& d_lse, std::span<const Partial> gradients, const TensorView& dsink,
                                   const MergeOptions& options, const Runtime& runtime,
                                   const std::function<Workspace(std::size_t bytes)>& scratch);
std::vector<Candidate> explain_merge_attention_as(const MergeNames& names, std::span<const Partial> partials,
                                                  const TensorView& o, const TensorView& lse,
                                                  const MergeOptions& options, const Runtime& runtime);
std::vector<Candidate> explain_merge_attention_on_as(const MergeNames& names, const GpuModel& gpu,
                                                     std::span<const Partial> partials, const TensorView& o,
                                                     const TensorView& lse, const MergeOptions& options,
                                                     const Runtime& runtime);

}  // namespace heddle

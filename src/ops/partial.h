// What bindings and tests call beside the public API of partial results.
#pragma once

#include "core/check.h"
#include "ops/attention.h"
#include "problem/partial.h"

namespace heddle {

// Checked arguments; the spans are the caller's. o may be absent where only the problem is wanted.
MergeProblem checked_merge_problem(const Check& check, std::span<const Partial> partials, const TensorView& sink,
                                   const TensorView& o, const TensorView& lse, const OutputNames& names = {});
MergeBackwardProblem checked_merge_backward_problem(const Check& check, std::span<const Partial> partials,
                                                    const TensorView& sink, const TensorView& d_o,
                                                    const TensorView& d_lse, std::span<const Partial> gradients,
                                                    const TensorView& dsink);

// merge_attention() with names for the outputs in errors.
void merge_attention_as(std::span<const Partial> partials, const TensorView& sink, const TensorView& o,
                        const TensorView& lse, const Runtime& runtime, const OutputNames& names);

}  // namespace heddle

// What bindings and tests call beside the public API of attention with a tolerance.
#pragma once

#include <functional>

#include "core/check.h"
#include "heddle/adaptive.h"
#include "ops/attention/attention.h"
#include "problem/adaptive.h"

namespace heddle {

// Outputs may be absent in queries. Throws Error.
AdaptiveProblem checked_adaptive_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const AdaptiveOutputs& outputs,
                                         const AdaptiveOptions& adaptive, const AttentionOptions& options,
                                         const OutputNames& names = {});
// replaced, o, lse, d_o and d_lse may be absent in queries.
AdaptiveBackwardProblem checked_adaptive_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                          const TensorView& v, const TensorView& replaced,
                                                          const TensorView& o, const TensorView& lse,
                                                          const TensorView& d_o, const TensorView& d_lse,
                                                          const AttentionGradients& gradients,
                                                          const AttentionOptions& options);

// adaptive_attention_forward() and its gradients with scratch that is asked for when the kernel is chosen
// (ops/attention/attention.h).
void adaptive_attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                     const AdaptiveOutputs& outputs, const AdaptiveOptions& adaptive,
                                     const AttentionOptions& options, const Runtime& runtime,
                                     const std::function<Workspace(std::size_t bytes)>& scratch,
                                     const OutputNames& names = {});
void adaptive_attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                      const TensorView& replaced, const TensorView& o, const TensorView& lse,
                                      const TensorView& d_o, const TensorView& d_lse,
                                      const AttentionGradients& gradients, const AttentionOptions& options,
                                      const Runtime& runtime,
                                      const std::function<Workspace(std::size_t bytes)>& scratch);

}  // namespace heddle

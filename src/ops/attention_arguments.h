// From a caller's views to a checked problem. Every rule of include/heddle/attention.h is enforced here, once.
#pragma once

#include "core/check.h"
#include "problem/attention.h"
#include "problem/index_checks.h"

namespace heddle {

// o and lse may be absent (not given) in workspace and explain queries. Throws Error.
AttentionProblem checked_forward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& o, const TensorView& lse,
                                         const AttentionOptions& options, const KeyNames& names = {});

// d_o, o, lse and d_lse may be absent in queries.
AttentionBackwardProblem checked_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                  const TensorView& v, const TensorView& o, const TensorView& lse,
                                                  const TensorView& d_o, const TensorView& d_lse,
                                                  const AttentionGradients& gradients, const AttentionOptions& options);

}  // namespace heddle

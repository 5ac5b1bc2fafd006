// From a caller's views to a checked problem. Every rule of include/heddle/attention.h is enforced here, once.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "core/check.h"
#include "ops/attention/attention.h"
#include "problem/attention.h"
#include "problem/index_checks.h"

namespace heddle {

// What k and v are to their caller.
struct KeyStorage {
  KeyNames names;
  std::int64_t capacity = 0;  // keys of a sequence, where k and v are rings of fewer slots
};

// o and lse may be absent (not given) in workspace and explain queries. Throws Error.
AttentionProblem checked_forward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                         const TensorView& v, const TensorView& o, const TensorView& lse,
                                         const AttentionOptions& options, const KeyStorage& storage = {},
                                         const OutputNames& outputs = {});

// Outputs that are written in the same call must be apart, and from what is read: other rows are written while a row is
// read. What is not given is apart.
using Named = std::pair<const char*, const TensorView*>;
void check_apart(const Check& check, std::span<const Named> outputs, std::span<const Named> inputs);

// d_o, o, lse and d_lse may be absent in queries.
AttentionBackwardProblem checked_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                  const TensorView& v, const TensorView& o, const TensorView& lse,
                                                  const TensorView& d_o, const TensorView& d_lse,
                                                  const AttentionGradients& gradients, const AttentionOptions& options);

}  // namespace heddle

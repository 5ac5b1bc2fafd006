// What bindings and tests call beside include/heddle/int4_cache.h.
#pragma once

#include <functional>

#include "core/attention_problem.h"
#include "heddle/int4_cache.h"

namespace heddle {

// attention_over_int4_cache() with scratch that is asked for when the kernel is chosen.
void attention_over_int4_cache_with(const TensorView& q, const Int4Cache& cache, const TensorView& o,
                                    const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                                    const std::function<Workspace(std::size_t bytes)>& scratch);

// The checked problem, as kernels get it.
AttentionProblem checked_int4_problem(const TensorView& q, const Int4Cache& cache, const AttentionOptions& options);

}  // namespace heddle

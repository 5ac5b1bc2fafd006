// What bindings and tests call beside include/heddle/int4_cache.h.
#pragma once

#include <functional>

#include "core/check.h"
#include "heddle/int4_cache.h"
#include "ops/attention/attention.h"
#include "problem/attention.h"
#include "problem/index_checks.h"
#include "problem/int4_append.h"

namespace heddle {

// attention_over_int4_cache() with scratch that is asked for when the kernel is chosen.
void attention_over_int4_cache_with(const TensorView& q, const Int4Cache& cache, const TensorView& o,
                                    const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                                    const std::function<Workspace(std::size_t bytes)>& scratch,
                                    const OutputNames& outputs = {});

// What errors call the cache's keys, values and rows.
constexpr KeyNames kInt4Names = {.k = IndexName::k_tail, .v = IndexName::v_tail, .rows = IndexName::row_idx};

// The checked problems, as kernels get them.
Int4AppendProblem checked_int4_append_problem(const Check& check, const TensorView& k_new, const TensorView& v_new,
                                              const Int4Cache& cache, const TensorView& seqlens,
                                              const Int4AppendOptions& options);
AttentionProblem checked_int4_problem(const TensorView& q, const Int4Cache& cache, const AttentionOptions& options);

}  // namespace heddle

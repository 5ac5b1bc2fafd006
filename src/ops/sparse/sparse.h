// What bindings and tests call beside the public API of attention over lists.
#pragma once

#include <cstdint>
#include <functional>

#include "core/check.h"
#include "heddle/sparse.h"
#include "ops/attention/attention.h"
#include "problem/sparse.h"

namespace heddle {

// Keys of a block that lists name.
inline void check_block_size(const Check& check, std::int64_t size) {
  check.require(size == 16 || size == 32 || size == 64 || size == 128, "block_size is ", size,
                ": it must be 16, 32, 64 or 128");
}

// o and lse may be absent in queries. Throws Error.
SparseProblem checked_sparse_problem(const Check& check, const TensorView& q, const TensorView& k, const TensorView& v,
                                     const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                     const AttentionOptions& options, const OutputNames& outputs = {});

// o, lse, d_o and d_lse may be absent in queries.
SparseBackwardProblem checked_sparse_backward_problem(const Check& check, const TensorView& q, const TensorView& k,
                                                      const TensorView& v, const BlockLists& lists, const TensorView& o,
                                                      const TensorView& lse, const TensorView& d_o,
                                                      const TensorView& d_lse, const AttentionGradients& gradients,
                                                      const AttentionOptions& options);

// sparse_attention_forward() and its gradients with scratch that is asked for when the kernel is chosen
// (ops/attention/attention.h).
void sparse_attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                   const AttentionOptions& options, const Runtime& runtime,
                                   const std::function<Workspace(std::size_t bytes)>& scratch,
                                   const OutputNames& outputs = {});
void sparse_attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v,
                                    const BlockLists& lists, const TensorView& o, const TensorView& lse,
                                    const TensorView& d_o, const TensorView& d_lse, const AttentionGradients& gradients,
                                    const AttentionOptions& options, const Runtime& runtime,
                                    const std::function<Workspace(std::size_t bytes)>& scratch);

}  // namespace heddle

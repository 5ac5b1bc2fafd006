// What bindings and tests call beside the public API of pooled keys and the choice of blocks.
#pragma once

#include <cstddef>
#include <functional>

#include "core/check.h"
#include "heddle/nsa.h"
#include "problem/pool.h"
#include "problem/select_blocks.h"

namespace heddle {

// Throw Error.
PoolProblem checked_pool_problem(const Check& check, const TensorView& x, const TensorView& pooled,
                                 const PoolOptions& options);
PoolBackwardProblem checked_pool_backward_problem(const Check& check, const TensorView& d_pooled, const TensorView& dx,
                                                  const PoolOptions& options);
SelectProblem checked_select_problem(const Check& check, const TensorView& q, const TensorView& k_pooled,
                                     const TensorView& lse, const TensorView& blocks, const SelectOptions& options);

// select_blocks() with scratch that is asked for when the kernel is chosen (ops/attention/attention.h).
void select_blocks_with(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                        const TensorView& blocks, const SelectOptions& options, const Runtime& runtime,
                        const std::function<Workspace(std::size_t bytes)>& scratch);

}  // namespace heddle

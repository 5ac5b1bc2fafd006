// The checks of linear layers over packed weights.
#pragma once

#include "core/check.h"
#include "core/linear_problem.h"

namespace heddle {

// y may be absent (not given) in queries. Throws Error.
LinearProblem checked_linear_problem(const Check& check, const TensorView& x, const PackedWeights& weights,
                                     const TensorView& y, const LinearOptions& options);

// `weights.data` against what packed_storage() says of it.
void check_packed(const Check& check, const PackedWeights& weights, const char* name);
// Of order rows16, checked.
lowbit::Panels panels_of(const PackedWeights& weights);

}  // namespace heddle

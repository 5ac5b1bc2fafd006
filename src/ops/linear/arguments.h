// The checks of linear layers over packed weights.
#pragma once

#include "core/check.h"
#include "problem/linear.h"

namespace heddle {

// The leading dimensions of `view` as rows.
RowsOf rows_of(const TensorView& view);
// The last dimension of a tensor of rows must be contiguous.
void check_contiguous_rows(const Check& check, const TensorView& view, const char* name);
void check_linear_dtype(const Check& check, const TensorView& view, const char* name);

// y may be absent (not given) in queries. Throws Error.
LinearProblem checked_linear_problem(const Check& check, const TensorView& x, const PackedWeights& weights,
                                     const TensorView& y, const LinearOptions& options, const char* y_name = "y");

// The copy of W in 16 bits, which is given.
void check_kept(const Check& check, const PackedWeights& weights, const char* name);
// `weights.data` against what packed_storage() says of it.
void check_packed(const Check& check, const PackedWeights& weights, const char* name);
// A problem that has what it says of checked weights, and nothing else.
LayerWeights layer_weights(const PackedWeights& weights);
// Of order rows16, checked.
lowbit::Panels panels_of(const PackedWeights& weights);
// x may be absent where it is not read.
LinearBackwardProblem checked_linear_backward_problem(const Check& check, const TensorView& dy, const TensorView& x,
                                                      const PackedWeights& weights, const LinearGradients& gradients,
                                                      const LinearOptions& options);

}  // namespace heddle

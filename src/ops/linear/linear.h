// linear_forward() for callers that have a name of their own for y, which errors then say.
#pragma once

#include "heddle/linear.h"

namespace heddle {

void linear_forward_with(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                         const LinearOptions& options, const Runtime& runtime,
                         const std::function<Workspace(std::size_t bytes)>& allocate, const char* y_name);

}  // namespace heddle

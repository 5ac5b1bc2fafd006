// What packing changes of the weights, told before it does.
#pragma once

#include <cstdint>

#include "heddle/linear.h"
#include "heddle/runtime.h"
#include "lowbit/matrix.h"

namespace heddle::lowbit {

// Scales are finite, and in orders of fragments not negative.
PackingError packing_error(const Matrix& matrix, WeightOrder order, Executor& executor);

// W[n, k] of an E2M1 format.
double weight_of(const Matrix& matrix, std::int64_t n, std::int64_t k);

}  // namespace heddle::lowbit

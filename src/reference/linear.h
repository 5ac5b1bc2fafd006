// The yardstick of linear layers: double precision, one output after the other.
#pragma once

#include "core/linear_problem.h"

namespace heddle::reference {

extern const LinearKernel kLinear;

// y[m, j] before it is rounded.
double linear_output(const LinearProblem& problem, std::int64_t m, std::int64_t j);

}  // namespace heddle::reference

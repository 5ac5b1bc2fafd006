// The CPU's candidate for linear layers over packed weights.
#pragma once

#include "core/linear_problem.h"

namespace heddle::cpu {

extern const LinearKernel kLinear;  // "cpu"

}  // namespace heddle::cpu

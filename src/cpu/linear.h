// The CPU's candidates for linear layers over packed weights.
#pragma once

#include "problem/linear.h"

namespace heddle::cpu {

extern const LinearKernel kLinear;                  // "cpu"
extern const LinearBackwardKernel kLinearBackward;  // "cpu"

}  // namespace heddle::cpu

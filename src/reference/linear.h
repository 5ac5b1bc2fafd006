// The yardstick of linear layers: double precision, one output after the other.
#pragma once

#include "core/linear_problem.h"

namespace heddle::reference {

extern const LinearKernel kLinear;

}  // namespace heddle::reference

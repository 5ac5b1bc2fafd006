// The CPU's candidate for packed weights as floats.
#pragma once

#include "problem/unpack_weights.h"

namespace heddle::cpu {

extern const UnpackKernel kUnpackWeights;  // "cpu"

}  // namespace heddle::cpu

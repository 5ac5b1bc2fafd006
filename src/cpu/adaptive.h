// Attention with a tolerance, on the CPU.
#pragma once

#include "problem/adaptive.h"

namespace heddle::cpu {

extern const AdaptiveForwardKernel kAdaptiveAttentionForward;
extern const AdaptiveBackwardKernel kAdaptiveAttentionBackward;

}  // namespace heddle::cpu

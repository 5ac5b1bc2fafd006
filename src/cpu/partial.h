// Partial results joined on the CPU.
#pragma once

#include "problem/partial.h"

namespace heddle::cpu {

extern const MergeKernel kMergeAttention;
extern const MergeBackwardKernel kMergeAttentionBackward;

}  // namespace heddle::cpu

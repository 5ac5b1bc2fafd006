// The CPU's candidates for attention.
#pragma once

#include "problem/attention.h"

namespace heddle::cpu {

extern const AttentionForwardKernel kAttentionForward;          // "cpu": tiles and online softmax
extern const AttentionForwardKernel kAttentionForwardBaseline;  // "cpu_baseline": the full score matrix
extern const AttentionBackwardKernel kAttentionBackward;        // "cpu"

}  // namespace heddle::cpu

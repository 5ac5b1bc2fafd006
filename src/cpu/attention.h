// The CPU's candidates for attention.
#pragma once

#include "problem/attention.h"

namespace heddle::cpu {

extern const AttentionForwardKernel kAttentionForward;          // "cpu": tiles and online softmax
extern const AttentionForwardKernel kAttentionForwardBaseline;  // "cpu_baseline": the full score matrix
extern const AttentionBackwardKernel kAttentionBackward;        // "cpu"

// Writes dsink of head h, which follows from o, lse and their gradients alone.
void sink_gradient(const AttentionBackwardProblem& p, std::int64_t h);

}  // namespace heddle::cpu

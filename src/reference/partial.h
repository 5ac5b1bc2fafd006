// Partial results joined, the yardstick: each formula of include/heddle/partial.h in doubles, as it stands there.
#pragma once

#include <vector>

#include "problem/partial.h"

namespace heddle::reference {

// Contiguous: o [B, S, H, Dv], lse [B, H, S]; packed, B is 1. The problem's own o and lse are not looked at.
struct Merged {
  std::vector<double> o, lse;
};
Merged merge_attention(const MergeProblem& p);

// Of each partial as Merged has them, and [H].
struct MergedBackward {
  std::vector<Merged> partials;
  std::vector<double> dsink;
};
MergedBackward merge_attention_backward(const MergeBackwardProblem& p);

extern const MergeKernel kMergeAttention;
extern const MergeBackwardKernel kMergeAttentionBackward;

}  // namespace heddle::reference

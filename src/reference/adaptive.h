// Attention with a tolerance in plain loops and doubles: what a call gives when these blocks are replaced and no other,
// and the bound of include/heddle/adaptive.h.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/adaptive.h"
#include "reference/attention.h"

namespace heddle::reference {

// Contiguous, in the operands' natural order, as reference::Forward.
struct AdaptiveForward {
  std::vector<double> o, lse;
  std::vector<double> bound;  // lse's shape
};

// By the blocks at p.replaced, which is read.
AdaptiveForward adaptive_forward(const AdaptiveProblem& p, Executor& executor);
// By the blocks at p.replaced. Probabilities are its own, not those of p.o and p.lse.
Backward adaptive_backward(const AdaptiveBackwardProblem& p, Executor& executor);

// Decides, run by run and block by block in order, with the row's whole sum, and writes p.replaced.
void decide_blocks(const AdaptiveProblem& p);

// The largest |v| of a kv head: the unit of tol and bound. Blocks that are never replaced for their values' sake (one
// that is not finite; none of them above 2^-100, or one above 2^100) do not count.
double longest_value(const AttentionProblem& p, std::int64_t b, std::int64_t kv_head);

// As candidates of the dispatcher, "reference": never chosen unless asked for by name.
extern const AdaptiveForwardKernel kAdaptiveAttentionForward;
extern const AdaptiveBackwardKernel kAdaptiveAttentionBackward;

}  // namespace heddle::reference

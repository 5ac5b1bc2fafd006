// Sums of gated branches, the yardstick: the formulas of problem/gate_branches.h in doubles.
#pragma once

#include <vector>

#include "problem/gate_branches.h"

namespace heddle::reference {

// Contiguous, of out's shape.
std::vector<double> gate_branches(const GateProblem& p);

struct GateGradients {
  std::vector<double> d_o, d_gate;  // contiguous, [B, S, H, Dv] and [B, S, H]
};
GateGradients gate_branches_backward(const GateBackwardProblem& p, int branch);

extern const GateKernel kGateBranches;
extern const GateBackwardKernel kGateBranchesBackward;

}  // namespace heddle::reference

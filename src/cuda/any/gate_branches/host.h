// Sums of gated branches and their gradients on the GPU, on `stream`.
#pragma once

#include <string>

#include "problem/gate_branches.h"

namespace heddle::cuda {

void sum_gated(const GateProblem& problem, void* stream);
void sum_gated_backward(const GateBackwardProblem& problem, void* stream);
// "16 threads for a row of a head, in pieces of 16 bytes"
std::string describe_gated(const GateProblem& problem);
std::string describe_gated(const GateBackwardProblem& problem);

}  // namespace heddle::cuda

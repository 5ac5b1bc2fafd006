// How a step is shared out, and the launch.
#pragma once

#include <cstddef>

#include "heddle/runtime.h"
#include "problem/nsa_step.h"

namespace heddle::cuda::sm90::nsa_step {

// CTAs that share a sequence's key/value head.
int cluster_of(const NsaStepProblem& problem);
std::size_t workspace_bytes(const NsaStepProblem& problem);
void launch(const NsaStepProblem& problem, const Runtime& runtime);

}  // namespace heddle::cuda::sm90::nsa_step

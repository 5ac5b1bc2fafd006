// What the host decides about a launch.
#pragma once

#include "cuda/sm90/attention/plan.h"
#include "cuda/sm90/attention_fwd/variants.h"

namespace heddle::cuda::sm90::attention_fwd {

// How a variant whose options these are reads a bias or mask; direct is for all that remains.
PlaneAccess access_to(const Plane& x, unsigned options, int pack);

// What a launch of `v` is told, but for the counter of tiles and lists of them.
Params params_for(const AttentionProblem& p, const Row& v, const attention::Plan& plan);

}  // namespace heddle::cuda::sm90::attention_fwd

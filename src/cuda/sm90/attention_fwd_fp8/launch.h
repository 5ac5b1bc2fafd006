// What the host decides about a launch.
#pragma once

#include "cuda/sm90/attention/plan.h"
#include "cuda/sm90/attention_fwd_fp8/variants.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// What a launch is told, but for the counter of tiles and lists of them.
inline Params params_for(const AttentionProblem& p, const attention::Plan& plan, int tile_k) {
  Params params{};
  fill(params, p, plan, tile_k);
  params.q_scale = p.q_scale;
  params.k_scale = p.k_scale;
  params.v_scale = p.v_scale;
  return params;
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

// All operations that choose between candidates.
#pragma once

#include "ops/adaptive/choice.h"
#include "ops/attention/choice.h"
#include "ops/kv_cache/choice.h"
#include "ops/linear/choice.h"
#include "ops/lowbit/choice.h"
#include "ops/nsa/choice.h"
#include "ops/partial/choice.h"
#include "ops/sparse/choice.h"

namespace heddle {

// By the problem of each. each(visit) calls visit.operator()<Problem>().
template <class... Problems>
struct Operations {
  template <class Visit>
  static void each(const Visit& visit) {
    (visit.template operator()<Problems>(), ...);
  }
};

using AllOperations =
    Operations<AttentionProblem, AttentionBackwardProblem, LinearProblem, LinearBackwardProblem, RotaryProblem,
               AppendProblem, Int4AppendProblem, lowbit::QuantizeCall, lowbit::DequantizeProblem, UnpackProblem,
               MergeProblem, MergeBackwardProblem, SparseProblem, SparseBackwardProblem, PoolProblem,
               PoolBackwardProblem, SelectProblem, GateProblem, GateBackwardProblem, NsaStepProblem, AdaptiveProblem,
               AdaptiveBackwardProblem>;

}  // namespace heddle

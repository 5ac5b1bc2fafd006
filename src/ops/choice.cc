#include "ops/choice.h"

#include "ops/adaptive/choice.h"
#include "ops/attention/choice.h"
#include "ops/kv_cache/choice.h"
#include "ops/linear/choice.h"
#include "ops/lowbit/choice.h"
#include "ops/nsa/choice.h"
#include "ops/partial/choice.h"
#include "ops/sparse/choice.h"

namespace heddle {
namespace {

template <class... Problems>
bool any_has(std::string_view name) {
  const auto is_named = [name](const auto* kernel) { return kernel->name == name; };
  return (std::ranges::any_of(Operation<Problems>::candidates(), is_named) || ...);
}

}  // namespace

bool names_a_kernel(std::string_view name) {
  return any_has<AttentionProblem, AttentionBackwardProblem, LinearProblem, LinearBackwardProblem, RotaryProblem,
                 AppendProblem, Int4AppendProblem, lowbit::QuantizeCall, lowbit::DequantizeProblem, UnpackProblem,
                 MergeProblem, MergeBackwardProblem, SparseProblem, SparseBackwardProblem, PoolProblem,
                 PoolBackwardProblem, SelectProblem, GateProblem, GateBackwardProblem, NsaStepProblem, AdaptiveProblem,
                 AdaptiveBackwardProblem>(name);
}

}  // namespace heddle

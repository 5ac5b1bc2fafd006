// unpack_weights and explain_unpack_weights: check, ask each candidate, choose, launch.
#include "core/overlap.h"
#include "core/runtime.h"
#include "heddle/linear.h"
#include "ops/linear/arguments.h"
#include "ops/lowbit/arguments.h"
#include "ops/lowbit/choice.h"

namespace heddle {
namespace {

UnpackProblem checked_unpack_problem(const Check& check, const PackedWeights& weights, const TensorView& out) {
  check.require(weights.order != WeightOrder::dense, "weights are in order dense: weights.kept is W as it is");
  check_packed(check, weights, "weights");
  const lowbit::Weights to = lowbit::checked_weights(check, out, "out", weights.device);
  check.require(out.shape[0] == weights.rows && out.shape[1] == weights.columns, "out is ", out, ": it must be [",
                weights.rows, ", ", weights.columns, "], as weights are");
  check.not_overlapping(out, "out");
  check.require(!may_share_memory(out, weights.data), "out shares memory with weights.data");
  return {layer_weights(weights), to};
}

}  // namespace

void unpack_weights(const PackedWeights& weights, const TensorView& out, const UnpackOptions& options,
                    const Runtime& runtime) {
  const Check check("unpack_weights");
  const UnpackProblem p = checked_unpack_problem(check, weights, out);
  const int workers = workers_of(runtime);
  const UnpackKernel& kernel = choose(check, p, wish_of<UnpackProblem>(check, options.force), workers);
  run(check, "unpack_weights", kernel, p, runtime, kernel.workspace(p, workers));
}

std::vector<Candidate> explain_unpack_weights(const PackedWeights& weights, const TensorView& out,
                                              const UnpackOptions& options, const Runtime& runtime) {
  const Check check("explain_unpack_weights", Data::to_come);
  return explained(checked_unpack_problem(check, weights, out), wish_of<UnpackProblem>(check, options.force),
                   workers_of(runtime));
}

}  // namespace heddle

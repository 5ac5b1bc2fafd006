// The candidate "sm90" of attention over lists of key blocks: what it takes, and what it costs.
#include "cuda/common/requirements.h"
#include "cuda/common/sparse_fwd/plan.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/sparse_fwd/host.h"

namespace heddle::cuda {
namespace {

using sparse_fwd::plan_of;

Refusal supports(const SparseProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  return sparse_fwd::refuse(p, plan_of(p, true));
}

constexpr CostLine<SparseProblem> kCosts[] = {
    {"sm90_sparse by blocks", {2e-6, 0, 3.0e12}, {DType::bf16, 1, 32, 8, 65536, 128, 1, 64, 16}},
    {"sm90_sparse by rows", {2e-6, 0, 5.0e12}, {DType::bf16, 1, 64, 4, 65536, 128, 4, 64, 16}},
    {"sm90_sparse together", {2e-6, 0, 3.2e12}, {DType::bf16, 1, 64, 4, 65536, 128, 1, 64, 16}},
};

double estimate(const SparseProblem& p, int /*workers*/) {
  const sparse_fwd::Plan plan = plan_of(p, true);
  const Cost& cost = cost_of(kCosts[static_cast<int>(plan.way)]);
  return cost.fixed + moved_bytes(p, plan) / cost.bytes;
}

std::string describe(const SparseProblem& p, int /*workers*/) { return description(p, plan_of(p, true)); }

}  // namespace

const SparseForwardKernel kSm90SparseForward = {
    .name = "sm90",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseProblem& p, int) { return plan_of(p, true).bytes; },
    .launch = [](const SparseProblem& p,
                 const Runtime& runtime) { sm90::sparse_fwd::launch(p, runtime.workspace.data, runtime.stream); },
    .describe = describe,
    .costs = kCosts,
};

}  // namespace heddle::cuda

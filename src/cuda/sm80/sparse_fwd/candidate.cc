// The candidate "sm80" of attention over lists of key blocks: what it takes, and what it costs.
#include "cuda/common/requirements.h"
#include "cuda/common/sparse_fwd/plan.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/sparse_fwd/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm80::sparse_fwd;

Plan plan_of(const SparseProblem& p) { return cuda::sparse_fwd::plan_of(p, false); }

Refusal supports(const SparseProblem& p) { return cuda::sparse_fwd::refuse(p, plan_of(p)); }

constexpr CostLine<SparseProblem> kCosts[] = {
    {"sm80_sparse by blocks", {2e-6, 0, 2.8e12}, {DType::bf16, 1, 64, 4, 65536, 128, 1, 64, 16}},
    {"sm80_sparse by rows", {2e-6, 0, 3.8e12}, {DType::bf16, 1, 64, 4, 65536, 128, 4, 64, 16}},
};

double estimate(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const Cost& cost = cost_of(kCosts[static_cast<int>(plan.way)]);
  return cost.fixed + moved_bytes(p, plan) / cost.bytes;
}

std::string describe(const SparseProblem& p, int /*workers*/) { return description(p, plan_of(p)); }

void launch(const SparseProblem& p, const Runtime& runtime) {
  const Plan plan = plan_of(p);
  if (plan.lists == 0 || p.H == 0) return;
  const Variant& v = first_that(variants(p.dtype), [&](const Variant& v) { return v.head == plan.head; });
  v.launch(p, plan, runtime.workspace.data, static_cast<cudaStream_t>(runtime.stream));
}

}  // namespace

std::span<const Variant> sm80::sparse_fwd::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const SparseForwardKernel kSm80SparseForward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseProblem& p, int) { return plan_of(p).bytes; },
    .launch = launch,
    .describe = describe,
    .costs = kCosts,
};

}  // namespace heddle::cuda

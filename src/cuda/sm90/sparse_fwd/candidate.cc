// The candidate "sm90" of attention over lists of key blocks: what it takes, and what it costs.
#include "cuda/common/requirements.h"
#include "cuda/common/sparse_fwd/plan.h"
#include "cuda/common/tensor_map.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm90/sparse_fwd/variants.h"

namespace heddle::cuda {
namespace {

using namespace sm90::sparse_fwd;

Plan plan_of(const SparseProblem& p) { return cuda::sparse_fwd::plan_of(p, true); }

Refusal supports(const SparseProblem& p) {
  if (Refusal reason = refuse_other_than_hopper(); !reason.empty()) return reason;
  return cuda::sparse_fwd::refuse(p, plan_of(p));
}

constexpr CostLine<SparseProblem> kCosts[] = {
    {"sm90_sparse by blocks", {2e-6, 0, 3.0e12}, {DType::bf16, 1, 32, 8, 65536, 128, 1, 64, 16}},
    {"sm90_sparse by rows", {2e-6, 0, 5.0e12}, {DType::bf16, 1, 64, 4, 65536, 128, 4, 64, 16}},
    {"sm90_sparse together", {2e-6, 0, 3.2e12}, {DType::bf16, 1, 64, 4, 65536, 128, 1, 64, 16}},
};

double estimate(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const Cost& cost = cost_of(kCosts[static_cast<int>(plan.way)]);
  return cost.fixed + moved_bytes(p, plan) / cost.bytes;
}

std::string describe(const SparseProblem& p, int /*workers*/) { return description(p, plan_of(p)); }

together::Params together_params(const SparseProblem& p, const Plan& plan, void* memory) {
  sparse::Arrays arrays(memory);
  together::Params params{};
  static_cast<cuda::sparse_fwd::Params&>(params) = params_of(p, plan, arrays);
  const auto map = [&](const Operand& x, std::int64_t size) {
    const std::int64_t rows = p.k_rows, batch = p.cu_seqlens_k.given ? 1 : p.B;
    return make_tensor_map(x.data, x.dtype,
                           TensorMapShape<4>{.extent = {size, rows, p.Hkv, batch},
                                             .stride = {x.stride_s, x.stride_h, x.stride_b},
                                             .box = {64, cuda::sparse_fwd::kTileKeys, 1, 1}});
  };
  params.k = map(p.k, p.D);
  params.v = map(p.v, p.Dv);
  params.tiles = static_cast<int>(plan.tiles_together);
  return params;
}

void launch(const SparseProblem& p, const Runtime& runtime) {
  const Plan plan = plan_of(p);
  if (plan.lists == 0 || p.H == 0) return;
  const Variant& v = first_that(variants(p.dtype), [&](const Variant& v) { return v.head == plan.head; });
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  if (plan.way == cuda::sparse_fwd::Way::together) {
    v.together(together_params(p, plan, runtime.workspace.data), stream);
  } else {
    v.launch(p, plan, runtime.workspace.data, stream);
  }
}

}  // namespace

std::span<const Variant> sm90::sparse_fwd::variants(DType type) {
  return variants_of<Instance, kTypes, kVariants>(type);
}

const SparseForwardKernel kSm90SparseForward = {
    .name = "sm90",
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

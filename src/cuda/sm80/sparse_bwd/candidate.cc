// The candidate "sm80" of the backward of attention over lists of key blocks: what it takes, and what it costs.
#include <limits>
#include <utility>

#include "core/check.h"
#include "cuda/common/requirements.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/sm80/sparse_bwd/host.h"

namespace heddle::cuda {
namespace {

using namespace sm80;
using namespace sm80::sparse_bwd;

Refusal supports(const SparseBackwardProblem& p) {
  if (Refusal reason = sparse::refuse(forward_of(p), plan_of(p)); !reason.empty()) return reason;
  if (p.float32_out) return text("it does not take o in float32 beside q of ", name_of(p.dtype));
  for (const auto& [name, x] : {std::pair{"dq", &std::as_const(p.dq)}, {"dk", &p.dk}, {"dv", &p.dv}}) {
    if (*x && x->dtype != p.dtype) {
      return text("it does not write ", name, " in ", name_of(x->dtype), " beside q of ", name_of(p.dtype));
    }
  }
  if (p.accumulate) return "it does not add to dq, dk and dv";
  if (p.merged) return "it has no backward of a piece whose o and lse are merged";
  if (p.d_o && !has_rows_of_16_bytes(p.d_o)) return "d_o must have contiguous rows at multiples of 16 bytes";
  constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max() / 2;
  if (p.Sk > kMostKeys) return text("k must have no more than ", kMostKeys, " keys, not ", p.Sk);
  return "";
}

constexpr CostLine<SparseBackwardProblem> kCosts[] = {
    {"sm80_sparse_bwd", {2e-6, 0, 1.8e12}, {DType::bf16, 1, 32, 8, 16384, 128, 1, 64, 16}},
};

// Each pair reads its rows of q and d_o, and writes and reads a partial result.
double estimate(const SparseBackwardProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const double rows = static_cast<double>(plan.lists * plan.units * plan.rows) * static_cast<double>(p.lists.typical);
  const Cost& cost = cost_of(kCosts[0]);
  return cost.fixed + rows * (2.0 * static_cast<double>(p.D + p.Dv) + 4.0 * plan.head * plan.subs) / cost.bytes;
}

std::string describe(const SparseBackwardProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const std::string at_a_time = p.lists.by_offsets ? text("lists of up to ", plan.pairs, " entries")
                                                   : text(plan.lists_at_once, " of ", plan.lists, " lists");
  return text("by blocks of ", p.lists.block_size, " keys, ", plan.tile_keys, " at a time: rows that name one, ",
              at_a_time, " at a time, partial results of dq of ", plan.rows,
              " rows in float16 joined in the order of slots, dk and dv in that of lists");
}

}  // namespace

const SparseBackwardKernel kSm80SparseBackward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseBackwardProblem& p, int) { return plan_of(p).bytes; },
    .launch = [](const SparseBackwardProblem& p,
                 const Runtime& runtime) { launch(p, runtime.workspace.data, runtime.stream); },
    .describe = describe,
    .costs = kCosts,
};

}  // namespace heddle::cuda

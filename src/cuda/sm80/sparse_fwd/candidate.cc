// The candidate "sm80" of attention over lists of key blocks: what it takes, and what it costs.
#include <algorithm>

#include "core/check.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/sm80/sparse_fwd/host.h"

namespace heddle::cuda {
namespace {

using namespace sm80;
using namespace sm80::sparse_fwd;

Refusal supports(const SparseProblem& p) { return sparse::refuse(p, plan_of(p)); }

// Each pair reads its rows of q, and writes and reads a partial result.
double estimate(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const double rows = static_cast<double>(plan.lists * plan.units * plan.rows) * static_cast<double>(p.lists.typical);
  return any::seconds_of_moving(rows * (2.0 * static_cast<double>(p.D) + 4.0 * plan.head), 2.5e12);
}

std::string describe(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  if (plan.direct) {
    return text("each entry by itself, ", plan.rows, " rows and ", plan.tile_keys,
                " keys at a time, partial results in float16 joined in the order of slots");
  }
  return text("by blocks of ", p.lists.block_size, " keys, ", plan.tile_keys,
              " at a time: rows that name one in tiles of 128, ", plan.lists_at_once, " of ", plan.lists,
              " lists at a time, partial results of ", plan.rows, " rows in float16 joined in the order of slots");
}

}  // namespace

const SparseForwardKernel kSm80SparseForward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseProblem& p, int) { return plan_of(p).bytes; },
    .launch = [](const SparseProblem& p, const Runtime& runtime) { launch(p, runtime.workspace.data, runtime.stream); },
    .describe = describe,
};

}  // namespace heddle::cuda

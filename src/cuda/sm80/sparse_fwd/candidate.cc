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

// By keys each pair reads its rows of q, and writes and reads a partial result; by rows each tile of rows reads the
// list's keys and values, which the L2 cache has.
double estimate(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  const double entries = static_cast<double>(p.lists.typical), lists = static_cast<double>(plan.lists * plan.units);
  if (plan.by_rows) {
    const double bytes = 2.0 * static_cast<double>(p.lists.block_size * (p.D + p.Dv));
    return any::seconds_of_moving(lists * plan.row_tiles * entries * bytes, 4.5e12);
  }
  const double rows = lists * static_cast<double>(plan.rows) * entries;
  return any::seconds_of_moving(rows * (2.0 * static_cast<double>(p.D) + 4.0 * plan.head), 2.8e12);
}

std::string describe(const SparseProblem& p, int /*workers*/) {
  const Plan plan = plan_of(p);
  if (plan.by_rows) {
    return text("by rows: tiles of ", plan.share > 1 ? 16 : 64, " of the ", plan.rows, " that share a list by 64 keys",
                plan.share > 1 ? text(", ", plan.share, " warps to a tile") : "",
                plan.parts > 1 ? text(", a list's keys in ", plan.parts, " parts") : "");
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

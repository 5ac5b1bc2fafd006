// The candidate "sm80" of attention over lists of key blocks: what it takes, and what it costs.
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/common/sparse_fwd/plan.h"
#include "cuda/kernels.h"
#include "cuda/sm80/sparse_fwd/host.h"

namespace heddle::cuda {
namespace {

using sparse_fwd::plan_of;

Refusal supports(const SparseProblem& p) { return sparse::refuse(p, plan_of(p)); }

// Rates as measured on an H100 at 65536 positions.
double estimate(const SparseProblem& p, int /*workers*/) {
  const sparse_fwd::Plan plan = plan_of(p);
  return any::seconds_of_moving(moved_bytes(p, plan), plan.by_rows ? 3.8e12 : 2.8e12);
}

std::string describe(const SparseProblem& p, int /*workers*/) { return description(p, plan_of(p)); }

}  // namespace

const SparseForwardKernel kSm80SparseForward = {
    .name = "sm80",
    .method = "flash",
    .device = Device::cuda,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = [](const SparseProblem& p, int) { return plan_of(p).bytes; },
    .launch = [](const SparseProblem& p,
                 const Runtime& runtime) { sm80::sparse_fwd::launch(p, runtime.workspace.data, runtime.stream); },
    .describe = describe,
};

}  // namespace heddle::cuda

// The candidates "cuda" for sums of gated branches and for their gradients.
#include "cuda/any/gate_branches/host.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"

namespace heddle::cuda {

const GateKernel kGateBranches = {
    .name = "cuda",
    .method = "gate",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const GateProblem&) { return refuse_before_ampere(); },
    .estimate = [](const GateProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const GateProblem& p, const Runtime& runtime) { sum_gated(p, runtime.stream); },
    .describe = [](const GateProblem& p, int) { return describe_gated(p); },
};

const GateBackwardKernel kGateBranchesBackward = {
    .name = "cuda",
    .method = "gate",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const GateBackwardProblem&) { return refuse_before_ampere(); },
    .estimate = [](const GateBackwardProblem& p, int) { return any::seconds_of_moving(2 * p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const GateBackwardProblem& p, const Runtime& runtime) { sum_gated_backward(p, runtime.stream); },
    .describe = [](const GateBackwardProblem& p, int) { return describe_gated(p); },
};

}  // namespace heddle::cuda

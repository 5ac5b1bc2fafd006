// The candidates "cuda" for means of blocks of keys and for their gradients.
#include "cuda/any/moved_bytes.h"
#include "cuda/any/pool_keys/host.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"

namespace heddle::cuda {

const PoolKernel kPoolKeys = {
    .name = "cuda",
    .method = "pool",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const PoolProblem&) { return refuse_before_ampere(); },
    .estimate = [](const PoolProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const PoolProblem& p, const Runtime& runtime) { pool(p, runtime.stream); },
    .describe = [](const PoolProblem& p, int) { return describe_pool(p); },
};

const PoolBackwardKernel kPoolKeysBackward = {
    .name = "cuda",
    .method = "pool",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const PoolBackwardProblem&) { return refuse_before_ampere(); },
    .estimate = [](const PoolBackwardProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const PoolBackwardProblem& p, const Runtime& runtime) { pool_backward(p, runtime.stream); },
    .describe = [](const PoolBackwardProblem& p, int) { return describe_pool(p); },
};

}  // namespace heddle::cuda

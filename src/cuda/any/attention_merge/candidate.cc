// The candidates "cuda" for merges of partial results and for their gradients.
#include "cuda/any/attention_merge/host.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"

namespace heddle::cuda {

const MergeKernel kMergeAttention = {
    .name = "cuda",
    .method = "merge",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const MergeProblem&) { return refuse_before_ampere(); },
    .estimate = [](const MergeProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = [](const MergeProblem& p, int) { return merge_workspace(p); },
    .launch = [](const MergeProblem& p,
                 const Runtime& runtime) { merge_partials(p, runtime.workspace.data, runtime.stream); },
    .describe = [](const MergeProblem& p, int) { return describe_merge(p); },
};

const MergeBackwardKernel kMergeAttentionBackward = {
    .name = "cuda",
    .method = "merge",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const MergeBackwardProblem&) { return refuse_before_ampere(); },
    .estimate = [](const MergeBackwardProblem& p, int) { return any::seconds_of_moving(2 * p.bytes()); },
    .workspace = [](const MergeBackwardProblem& p, int) { return merge_backward_workspace(p); },
    .launch = [](const MergeBackwardProblem& p,
                 const Runtime& runtime) { merge_partials_backward(p, runtime.workspace.data, runtime.stream); },
    .describe = [](const MergeBackwardProblem& p, int) { return describe_merge(p); },
};

}  // namespace heddle::cuda

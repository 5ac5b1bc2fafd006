// The candidate "cuda" for appends to the cache in 4 bits.
#include "cuda/any/int4_cache/host.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"

namespace heddle::cuda {

const Int4AppendKernel kInt4CacheAppend = {
    .name = "cuda",
    .method = "append",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const Int4AppendProblem&) { return refuse_before_ampere(); },
    .estimate = [](const Int4AppendProblem& p, int) { return any::kLaunch + any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const Int4AppendProblem& p, const Runtime& runtime) { append_int4_cache(p, runtime.stream); },
    .describe = [](const Int4AppendProblem&,
                   int) { return std::string("blocks that become full are encoded, then rows go to the rings"); },
};

}  // namespace heddle::cuda

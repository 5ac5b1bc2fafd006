// The candidates "cuda" for rotary embedding and for appends to a cache.
#include "cuda/any/kv_cache/host.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"

namespace heddle::cuda {

const RotaryKernel kRotary = {
    .name = "cuda",
    .method = "rotary",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const RotaryProblem&) { return refuse_before_ampere(); },
    .estimate = [](const RotaryProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const RotaryProblem& p, const Runtime& runtime) { apply_rotary(p, runtime.stream); },
    .describe = [](const RotaryProblem&, int) { return std::string("a block of threads for a row of all heads"); },
};

const AppendKernel kKvCacheAppend = {
    .name = "cuda",
    .method = "append",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const AppendProblem&) { return refuse_before_ampere(); },
    .estimate = [](const AppendProblem& p, int) { return any::seconds_of_moving(p.bytes()); },
    .workspace = no_workspace,
    .launch = [](const AppendProblem& p, const Runtime& runtime) { append_kv_cache(p, runtime.stream); },
    .describe = [](const AppendProblem& p, int) -> std::string {
      if (p.finds_k_scale || p.finds_v_scale)
        return "a block of threads for a row of all heads, which finds its scales";
      return "a block of threads for a row of all heads";
    },
};

}  // namespace heddle::cuda

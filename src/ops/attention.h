// What bindings call beside the public API.
#pragma once

#include <functional>

#include "heddle/attention.h"

namespace heddle {

// attention_forward() with scratch that is asked for when the kernel is chosen: one check of the arguments instead of
// two, which a short call notices. `scratch` is called once, if any is needed; runtime.workspace is not looked at.
void attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                            const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                            const std::function<Workspace(std::size_t bytes)>& scratch);

}  // namespace heddle

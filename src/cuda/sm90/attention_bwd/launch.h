// What the candidate and other instantiations of its kernels share on the host.
#pragma once

#include "cuda/sm90/attention_bwd/variants.h"
#include "heddle/runtime.h"

namespace heddle::cuda::sm90::attention_bwd {

// Bytes that a call takes by the tiles of `v`.
std::size_t workspace_of(const AttentionBackwardProblem& p, const Variant& v);

// All launches of a call. lists: for a `v` that walks over them.
void launch_call(const AttentionBackwardProblem& p, const Variant& v, const TileLists& lists, const Runtime& runtime);

}  // namespace heddle::cuda::sm90::attention_bwd

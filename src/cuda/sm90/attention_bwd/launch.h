// What the candidate and other instantiations of its kernels share on the host.
#pragma once

#include "cuda/sm90/attention_bwd/variants.h"
#include "heddle/runtime.h"

namespace heddle::cuda::sm90::attention_bwd {

// Empty if all operands and gradients lie as the tensor memory accelerator needs them, and their tiles can be counted.
Refusal refuse_layout(const AttentionBackwardProblem& p);

// How many CTAs are to share the heads of a kv head: where there are few tiles of keys, and a CTA has many query tiles.
int parts_of_group(const AttentionBackwardProblem& p, const Variant& v);

// Bytes that a call takes by the tiles of `v`.
std::size_t workspace_of(const AttentionBackwardProblem& p, const Variant& v, int parts);

// All launches of a call. lists: for a `v` that walks over them.
void launch_call(const AttentionBackwardProblem& p, const Variant& v, int parts, const TileLists& lists,
                 const Runtime& runtime);

}  // namespace heddle::cuda::sm90::attention_bwd

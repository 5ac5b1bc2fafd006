// What the candidate and other instantiations of its kernels share on the host.
#pragma once

#include "cuda/sm80/attention_bwd/variants.h"
#include "heddle/runtime.h"

namespace heddle::cuda::sm80::attention_bwd {

// Bytes that a call takes by the tiles of `v`.
std::size_t workspace_of(const AttentionBackwardProblem& p, const Variant& v);

// All launches of a call. lists: for a `v` that walks over them; for each tile of keys of each kv head tiles of query
// rows, [B, Hkv, k_tiles, length], which all heads of the group have in common.
void launch_call(const AttentionBackwardProblem& p, const Variant& v, const TileLists& lists, const Runtime& runtime);

}  // namespace heddle::cuda::sm80::attention_bwd

// What bindings and other operations call beside the public API.
#pragma once

#include <functional>

#include "heddle/attention.h"
#include "heddle/kv_cache.h"
#include "problem/index_rules.h"

namespace heddle {

// What errors call the outputs.
struct OutputNames {
  const char *o = "o", *lse = "lse";
};

// attention_forward() and attention_backward() with scratch that is asked for when the kernel is chosen: one check of
// the arguments instead of two, which a short call notices. `scratch` is called once, if any is needed;
// runtime.workspace is not looked at.
void attention_forward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                            const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                            const std::function<Workspace(std::size_t bytes)>& scratch,
                            const OutputNames& outputs = {});

void attention_backward_with(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                             const TensorView& lse, const TensorView& d_o, const TensorView& d_lse,
                             const AttentionGradients& gradients, const AttentionOptions& options,
                             const Runtime& runtime, const std::function<Workspace(std::size_t bytes)>& scratch);

// The same for attention_with_kv_cache(). lengths_name: what errors call options.seqused_k.
void attention_with_kv_cache_with(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                  const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                                  const TensorView& lse, const Rotary& rotary, const AttentionOptions& options,
                                  const Runtime& runtime, const std::function<Workspace(std::size_t bytes)>& scratch,
                                  IndexName lengths_name, const OutputNames& outputs = {});

}  // namespace heddle

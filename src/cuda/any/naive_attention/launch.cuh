// Starts one instantiation.
#pragma once

#include "cuda/any/naive_attention/kernel.cuh"
#include "cuda/any/naive_attention/variants.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda::any::naive_attention {

template <class T>
void launch(const Params& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  start("attention_forward", naive_attention_kernel<T>, {static_cast<unsigned>(p.B * p.H * p.Sq), kThreads}, stream,
        params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  return {kVariants[kRow], kType, launch<ElementOf<kType>>};
}

}  // namespace heddle::cuda::any::naive_attention

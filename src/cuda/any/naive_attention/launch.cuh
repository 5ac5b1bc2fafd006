// Starts one instantiation.
#pragma once

#include "cuda/any/naive_attention/kernel.cuh"
#include "cuda/any/naive_attention/launch.h"
#include "cuda/common/device.h"

namespace heddle::cuda::any::naive_attention {

template <class T>
void launch(const Params& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  naive_attention_kernel<T><<<static_cast<unsigned>(p.B * p.H * p.Sq), kThreads, 0, stream>>>(params);
  check(cudaGetLastError(), "attention_forward");
}

}  // namespace heddle::cuda::any::naive_attention

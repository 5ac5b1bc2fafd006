// Starts the three kernels for one dtype.
#pragma once

#include "cuda/any/attention_baseline/output.cuh"
#include "cuda/any/attention_baseline/scores.cuh"
#include "cuda/any/attention_baseline/softmax.cuh"
#include "cuda/any/attention_baseline/variants.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda::any::attention_baseline {

template <class T>
void launch(const Params& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  const std::int64_t tiles = p.B * p.H * params.q_tiles, rows = p.B * p.H * p.Sq;
  const auto run = [&](void (*kernel)(Params), std::int64_t blocks) {
    start("attention_forward", kernel, {static_cast<unsigned>(blocks), kThreads}, stream, params);
  };
  run(scores_kernel<T>, tiles * params.k_tiles);
  run(softmax_kernel<T>, (rows + kThreads / 32 - 1) / (kThreads / 32));
  if (p.Dv <= 64) {
    run(output_kernel<T, 64>, tiles);
  } else {
    run(output_kernel<T, 128>, tiles * (p.Dv > 128 ? 2 : 1));
  }
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  return {kVariants[kRow], kType, launch<ElementOf<kType>>};
}

}  // namespace heddle::cuda::any::attention_baseline

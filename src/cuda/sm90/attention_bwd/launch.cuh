// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_bwd/dq.cuh"
#include "cuda/sm90/attention_bwd/kernel.cuh"
#include "cuda/sm90/attention_bwd/launch.h"

namespace heddle::cuda::sm90::attention_bwd {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("attention_backward", attention_bwd_kernel<C>,
        {static_cast<unsigned>(grid), kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <class C>
void launch_dq(const Params& params, cudaStream_t stream) {
  const AttentionBackwardProblem& p = params.problem;
  const std::int64_t blocks = p.B * p.H * ((p.Sq + kDqRows - 1) / kDqRows);
  start("attention_backward", dq_kernel<typename C::Element, C::kHeadSize>,
        {static_cast<unsigned>(blocks), kDqThreads}, stream, params);
}

template <class C>
constexpr Variant variant() {
  return {.head_size = C::kHeadSize,
          .tile_q = C::kTileQ,
          .tile_k = C::kTileK,
          .launch = launch<C>,
          .launch_dq = launch_dq<C>};
}

}  // namespace heddle::cuda::sm90::attention_bwd

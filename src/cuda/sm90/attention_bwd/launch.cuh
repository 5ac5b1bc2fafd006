// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_bwd/kernel.cuh"
#include "cuda/sm90/attention_bwd/launch.h"
#include "cuda/sm90/attention_bwd/sums.cuh"

namespace heddle::cuda::sm90::attention_bwd {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("attention_backward", attention_bwd_kernel<C>, {static_cast<unsigned>(grid), kThreads, sizeof(SharedMemory<C>)},
        stream, params);
}

template <class C>
void round_sums(const Params& params, const Sums& sums, cudaStream_t stream) {
  const std::int64_t blocks = params.problem.B * sums.heads * ((sums.longest + kSumRows - 1) / kSumRows);
  start("attention_backward", round_sums_kernel<typename C::Element, C::kColumns>,
        {static_cast<unsigned>(blocks), kSumThreads}, stream, params, sums);
}

template <class C>
constexpr Variant variant() {
  return {
      .columns = C::kColumns, .tile_q = C::kTileQ, .tile_k = C::kTileK, .launch = launch<C>, .round = round_sums<C>};
}

}  // namespace heddle::cuda::sm90::attention_bwd

// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_fwd/kernel.cuh"
#include "cuda/sm90/attention_fwd/launch.h"

namespace heddle::cuda::sm90::attention_fwd {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("attention_forward", attention_fwd_kernel<C>,
        {static_cast<unsigned>(grid), C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <class C>
constexpr Variant variant(DType dtype) {
  return {.dtype = dtype,
          .head_size = C::kHeadSize,
          .value_size = C::kValueSize,
          .consumers = C::kConsumers,
          .tile_k = C::kTileK,
          .options = C::kOptions,
          .planes = C::kPlanes,
          .launch = launch<C>};
}

}  // namespace heddle::cuda::sm90::attention_fwd

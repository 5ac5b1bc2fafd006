// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/linear_w4a16/kernel.cuh"
#include "cuda/sm90/linear_w4a16/launch.h"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("linear", linear_w4a16_kernel<C>, {static_cast<unsigned>(grid), C::kThreads, sizeof(SharedMemory<C>)}, stream,
        params);
}

template <class C>
constexpr Variant variant() {
  return {.tokens = C::kTokens, .row_blocks = C::kConsumers * C::kRowBlocks, .launch = launch<C>};
}

}  // namespace heddle::cuda::sm90::linear_w4a16

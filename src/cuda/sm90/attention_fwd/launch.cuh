// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_fwd/kernel.cuh"
#include "cuda/sm90/attention_fwd/variants.h"

namespace heddle::cuda::sm90::attention_fwd {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("attention_forward", attention_fwd_kernel<C>,
        {static_cast<unsigned>(grid), C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<Config<ElementOf<kType>, row.tiles, row.options>>};
}

}  // namespace heddle::cuda::sm90::attention_fwd

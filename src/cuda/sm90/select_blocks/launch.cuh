// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/select_blocks/kernel.cuh"
#include "cuda/sm90/select_blocks/variants.h"

namespace heddle::cuda::sm90::select_blocks {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  start("select_blocks", select_kernel<C>, {static_cast<unsigned>(grid), kThreads, sizeof(SharedMemory<C>)}, stream,
        params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<Config<ElementOf<kType>, row.head, row.halvings>>};
}

}  // namespace heddle::cuda::sm90::select_blocks

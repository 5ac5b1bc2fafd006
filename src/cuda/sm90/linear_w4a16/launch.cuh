// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/linear_w4a16/kernel.cuh"
#include "cuda/sm90/linear_w4a16/launch.h"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("linear_forward", linear_w4a16_kernel<C>,
        {.blocks = static_cast<unsigned>(grid),
         .threads = C::kThreads,
         .shared_bytes = sizeof(SharedMemory<C>),
         .overlaps = true},
        stream, params);
}

template <class C>
constexpr Variant variant() {
  return {.tile = {.tokens = C::kTokens,
                   .row_blocks = C::kTileBlocks,
                   .unit_blocks = C::kUnitBlocks,
                   .row_groups = C::kRowGroups,
                   .accumulators = C::kAccumulators,
                   .slices = linear::kSlices<C>},
          .x_box = {C::kPanelColumns, C::kUnitBlocks * C::kBlockPanels},
          .launch = launch<C>};
}

}  // namespace heddle::cuda::sm90::linear_w4a16

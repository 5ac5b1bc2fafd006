// Starts one instantiation.
#pragma once

#include "cuda/common/clusters.cuh"
#include "cuda/sm90/linear/kernel.cuh"
#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear {

using cuda::linear::kSlices;

template <class C, class Consumer>
void launch(const Params<typename C::WeightBlock>& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(typename Consumer::Memory) <= kHopperSharedBytes, "more shared memory than a block can have");
  start("linear_forward", linear_kernel<C, Consumer>,
        {.blocks = static_cast<unsigned>(grid),
         .threads = C::kThreads,
         .shared_bytes = sizeof(typename Consumer::Memory),
         .cluster = static_cast<unsigned>(params.schedule.cluster),
         .overlaps = true},
        stream, params);
}

template <class C, class Consumer>
int clusters_at_once(int size) {
  static ClustersAtOnce known;
  return known.of(size, "linear_forward", linear_kernel<C, Consumer>,
                  {.threads = C::kThreads, .shared_bytes = sizeof(typename Consumer::Memory)});
}

template <class C, class Consumer>
constexpr Variant<typename C::WeightBlock> variant() {
  return {.tile = {.tokens = C::kTokens,
                   .row_blocks = C::kTileBlocks,
                   .unit_blocks = C::kUnitBlocks,
                   .row_groups = C::kRowGroups,
                   .accumulators = C::kAccumulators,
                   .slices = kSlices<C>,
                   .max_cluster = 8},
          .x_panels = C::kUnitBlocks * C::kBlockPanels,
          .launch = launch<C, Consumer>,
          .clusters_at_once = clusters_at_once<C, Consumer>};
}

}  // namespace heddle::cuda::sm90::linear

// Starts one decoder's instantiations.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/linear/kernel.cuh"
#include "cuda/sm80/linear/launch.h"

namespace heddle::cuda::sm80::linear {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  const std::size_t shared = sizeof(SharedMemory<C>) + params.stages * sizeof(Stage<C>) +
                             (C::Decoder::kTable ? table_bytes(params.lookup_copies) : 0);
  start("linear_forward", linear_kernel<C>,
        {.blocks = static_cast<unsigned>(grid), .threads = C::kThreads, .shared_bytes = shared, .overlaps = true},
        stream, params);
}

template <class C>
constexpr Variant variant() {
  return {.tile = {.tokens = C::kTokens,
                   .row_blocks = C::kTileBlocks,
                   .unit_blocks = C::kUnitBlocks,
                   .row_groups = C::kRowGroups,
                   .accumulators = C::kAccumulators,
                   .slices = kSlices<C>},
          .fixed_bytes = sizeof(SharedMemory<C>),
          .stage_bytes = sizeof(Stage<C>),
          .table = C::Decoder::kTable,
          .launch = launch<C>};
}

template <class D>
constexpr Variants variants() {
  using Few = Config<D, 16, 1, 4, 1>;
  using Many = Config<D, 64, 2, 1, 2>;
  constexpr int kLeast = 2, kCopies = 8;  // what a GPU with the least shared memory has room for
  static_assert(shared_bytes(variant<Few>(), kLeast, kCopies) <= kAmpereSharedBytes);
  static_assert(shared_bytes(variant<Many>(), kLeast, kCopies) <= kAmpereSharedBytes);
  return {variant<Few>(), variant<Many>()};
}

}  // namespace heddle::cuda::sm80::linear

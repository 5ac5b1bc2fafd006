// Starts the instantiations of a source.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/linear_gemv/kernel.cuh"
#include "cuda/sm80/linear_gemv/variants.h"

namespace heddle::cuda::sm80::linear_gemv {

// Launches do not overlap: CTAs that start early take places where they keep others of theirs waiting.
template <class C>
void launch(const Params& params, std::size_t shared_bytes, cudaStream_t stream) {
  const int slabs = params.row_blocks * (kBlockRows / kSlabRows);
  start("linear_forward", gemv_kernel<C>,
        {.blocks = static_cast<unsigned>((slabs + C::kSlabs - 1) / C::kSlabs),
         .threads = C::kThreads,
         .shared_bytes = shared_bytes},
        stream, params);
}

template <class C>
constexpr Variant variant_of() {
  return {.slabs = C::kSlabs,
          .resident = C::kResident,
          .block_columns = C::Source::kBlockColumns,
          .fixed_bytes = sizeof(SharedMemory<C>),
          .launch = launch<C>};
}

template <DType kType, int kRow>
Variants Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using Source = E2M1<ElementOf<kType>>;
  return {row, kType, variant_of<Config<Source, row.tiles.few>>(), variant_of<Config<Source, row.tiles.many>>()};
}

}  // namespace heddle::cuda::sm80::linear_gemv

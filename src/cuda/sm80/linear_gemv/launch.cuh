// Starts the instantiations of a source.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/linear_gemv/kernel.cuh"
#include "cuda/sm80/linear_gemv/launch.h"

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
constexpr Variant variant() {
  return {.slabs = C::kSlabs,
          .resident = C::kResident,
          .block_columns = C::Source::kBlockColumns,
          .fixed_bytes = sizeof(SharedMemory<C>),
          .launch = launch<C>};
}

template <class S>
constexpr Variants variants() {
  return {variant<Config<S, 1, 8>>(), variant<Config<S, 2, 4>>()};
}

}  // namespace heddle::cuda::sm80::linear_gemv

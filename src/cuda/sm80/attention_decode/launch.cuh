// Starts one instantiation.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_decode/int4_kernel.cuh"
#include "cuda/sm80/attention_decode/kernel.cuh"
#include "cuda/sm80/attention_decode/variants.h"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
void launch(const Params& params, unsigned ctas, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than a block can have");
  const Grid grid{ctas, C::kThreads, sizeof(SharedMemory<C>)};
  if constexpr (C::kInt4) {
    start("attention_forward", attention_decode_int4_kernel<C>, grid, stream, params);
  } else {
    start("attention_forward", attention_decode_kernel<C>, grid, stream, params);
  }
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using T = ElementOf<kType>;
  using Stored = std::conditional_t<row.cache == Cache::kE4m3, std::uint8_t, T>;
  using C = std::conditional_t<row.cache == Cache::kInt4, Int4Config<T, row.tiles>, Config<T, Stored, row.tiles>>;
  return {row, kType, sizeof(SharedMemory<C>), launch<C>};
}

}  // namespace heddle::cuda::sm80::attention_decode

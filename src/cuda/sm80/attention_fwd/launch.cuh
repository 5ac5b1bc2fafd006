// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_fwd/kernel.cuh"
#include "cuda/sm80/attention_fwd/variants.h"

namespace heddle::cuda::sm80::attention_fwd {

template <class C>
void launch(const Params& params, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than a block can have");
  const auto tiles = static_cast<unsigned>(params.q_tiles) * params.units;
  start("attention_forward", attention_fwd_kernel<C>, {tiles, C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <class C>
constexpr Variant variant_of() {
  return {.tile_q = C::kTileQ, .launch = launch<C>};
}

template <DType kType, int kRow>
Variants Instance<kType, kRow>::variant() {
  constexpr Row row = kType == DType::f32 ? kF32Variants[kRow] : k16BitVariants[kRow];
  constexpr Tiling kPlain = row.tilings.plain, kOptions = row.tilings.options;
  constexpr int kProducts = row.products, kHeadSize = row.head;
  using T = ElementOf<kType>;
  if constexpr (row.int8_qk) {
    using C = Config<T, kProducts, kHeadSize, kPlain, false, AlignedRows, std::int8_t>;
    return {row, kType, variant_of<C>(), {}, {}};
  } else {
    return {row, kType, variant_of<Config<T, kProducts, kHeadSize, kPlain, false, AlignedRows>>(),
            variant_of<Config<T, kProducts, kHeadSize, kOptions, true, AlignedRows>>(),
            variant_of<Config<T, kProducts, kHeadSize, kOptions, true, StridedRows>>()};
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd

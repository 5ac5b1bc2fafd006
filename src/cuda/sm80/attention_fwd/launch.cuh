// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_fwd/kernel.cuh"
#include "cuda/sm80/attention_fwd/launch.h"

namespace heddle::cuda::sm80::attention_fwd {

template <class C>
void launch(const Params& params, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than a block can have");
  const auto tiles = static_cast<unsigned>(params.q_tiles) * params.units;
  start("attention_forward", attention_fwd_kernel<C>, {tiles, C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <class C>
constexpr Variant variant() {
  return {.tile_q = C::kTileQ, .launch = launch<C>};
}

// kOptions: smaller tiles, which leave registers for options.
template <class T, int kProducts, int kHeadSize, Tiling kPlain, Tiling kOptions>
constexpr Variants variants() {
  return {.plain = variant<Config<T, kProducts, kHeadSize, kPlain, false, AlignedRows>>(),
          .options = variant<Config<T, kProducts, kHeadSize, kOptions, true, AlignedRows>>(),
          .strided = variant<Config<T, kProducts, kHeadSize, kOptions, true, StridedRows>>()};
}

template <class T, int kHeadSize, Tiling kTiling>
constexpr Variant int8_variant() {
  return variant<Config<T, 1, kHeadSize, kTiling, false, AlignedRows, std::int8_t>>();
}

}  // namespace heddle::cuda::sm80::attention_fwd

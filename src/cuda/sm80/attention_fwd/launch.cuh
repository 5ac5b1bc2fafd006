// Starts one instantiation.
#pragma once

#include "cuda/common/device.h"
#include "cuda/sm80/attention_fwd/kernel.cuh"
#include "cuda/sm80/attention_fwd/launch.h"

namespace heddle::cuda::sm80::attention_fwd {

template <class C>
void launch(const Params& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedMemory<C>);
  static_assert(kBytes <= 99 * 1024, "more shared memory than a block can have on sm_86 and sm_89");
  const auto kernel = attention_fwd_kernel<C>;
  // More than 48 KB must be asked for, on each device; asking again is harmless and takes well under a microsecond.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "attention_forward");
  kernel<<<static_cast<unsigned>(params.q_tiles) * params.units, C::kThreads, kBytes, stream>>>(params);
  check(cudaGetLastError(), "attention_forward");
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

}  // namespace heddle::cuda::sm80::attention_fwd

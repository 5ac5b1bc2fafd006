// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_decode/kernel.cuh"
#include "cuda/sm80/attention_decode/launch.h"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
void launch(const Params& params, unsigned ctas, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than a block can have");
  start("attention_forward", attention_decode_kernel<C>, {ctas, C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

// kWarps, kStages and kBlocks as in Config.
template <class T, class Stored, int kHeadSize, int kWarps, int kStages, int kBlocks>
constexpr Variant variant() {
  using C = Config<T, Stored, kHeadSize, kWarps, kStages, kBlocks>;
  return {.head_size = kHeadSize, .shared_bytes = sizeof(SharedMemory<C>), .blocks = kBlocks, .launch = launch<C>};
}

}  // namespace heddle::cuda::sm80::attention_decode

// Starts one instantiation.
#pragma once

#include "cuda/common/device.h"
#include "cuda/sm80/attention_decode/kernel.cuh"
#include "cuda/sm80/attention_decode/launch.h"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
void launch(const Params& params, unsigned ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedMemory<C>);
  static_assert(kBytes <= 99 * 1024, "more shared memory than a block can have on sm_86 and sm_89");
  const auto kernel = attention_decode_kernel<C>;
  // More than 48 KB must be asked for, on each device; asking again is harmless and takes well under a microsecond.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "attention_forward");
  kernel<<<ctas, C::kThreads, kBytes, stream>>>(params);
  check(cudaGetLastError(), "attention_forward");
}

// kWarps, kStages and kBlocks as in Config.
template <class T, class Stored, int kHeadSize, int kWarps, int kStages, int kBlocks>
constexpr Variant variant() {
  using C = Config<T, Stored, kHeadSize, kWarps, kStages, kBlocks>;
  return {.head_size = kHeadSize, .shared_bytes = sizeof(SharedMemory<C>), .blocks = kBlocks, .launch = launch<C>};
}

}  // namespace heddle::cuda::sm80::attention_decode

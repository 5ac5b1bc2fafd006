// Starts one instantiation over a cache in 4 bits.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_decode/int4_kernel.cuh"
#include "cuda/sm80/attention_decode/launch.h"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
void launch_int4(const Params& params, unsigned ctas, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than a block can have");
  start("attention_forward", attention_decode_int4_kernel<C>, {ctas, C::kThreads, sizeof(SharedMemory<C>)}, stream,
        params);
}

template <class T, int kHeadSize>
constexpr Variant int4_variant() {
  using C = Int4Config<T, kHeadSize>;
  return {.head_size = C::kHeadSize,
          .shared_bytes = sizeof(SharedMemory<C>),
          .blocks = C::kBlocks,
          .launch = launch_int4<C>};
}

}  // namespace heddle::cuda::sm80::attention_decode

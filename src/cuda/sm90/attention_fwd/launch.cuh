// Starts one instantiation.
#pragma once

#include "cuda/common/device.h"
#include "cuda/sm90/attention_fwd/kernel.cuh"
#include "cuda/sm90/attention_fwd/launch.h"

namespace heddle::cuda::sm90::attention_fwd {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedMemory<C>);
  static_assert(kBytes <= 227 * 1024, "more shared memory than a Hopper block can have");
  const auto kernel = attention_fwd_kernel<C>;
  // More than 48 KB must be asked for, on each device; asking again is harmless and takes well under a microsecond.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "attention_forward");
  kernel<<<grid, C::kThreads, kBytes, stream>>>(params);
  check(cudaGetLastError(), "attention_forward");
}

template <class C>
constexpr Variant variant(DType dtype) {
  return {.dtype = dtype,
          .head_size = C::kHeadSize,
          .value_size = C::kValueSize,
          .consumers = C::kConsumers,
          .tile_k = C::kTileK,
          .planes = C::kPlanes,
          .launch = launch<C>};
}

}  // namespace heddle::cuda::sm90::attention_fwd

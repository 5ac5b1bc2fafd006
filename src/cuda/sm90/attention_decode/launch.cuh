// Starts one instantiation.
#pragma once

#include "cuda/common/device.h"
#include "cuda/sm90/attention_decode/kernel.cuh"
#include "cuda/sm90/attention_decode/launch.h"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  const auto kernel = attention_decode_kernel<C>;
  // More than 48 KB must be asked for, on each device; asking again is harmless and takes well under a microsecond.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.plan.shared_bytes),
        "attention_forward");
  kernel<<<grid, kThreads, params.plan.shared_bytes, stream>>>(params);
  check(cudaGetLastError(), "attention_forward");
}

template <class C>
constexpr Variant variant() {
  return {.size = C::kSize,
          .row_tiles = C::kRowTiles,
          .panels = C::kPanels,
          .panel_elements = C::kPanelElements,
          .q_pitch = C::kQPitch,
          .control_bytes = sizeof(Control),
          .merge_bytes = C::kMergeBytes,
          .launch = launch<C>};
}

}  // namespace heddle::cuda::sm90::attention_decode

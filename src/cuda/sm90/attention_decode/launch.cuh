// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_decode/kernel.cuh"
#include "cuda/sm90/attention_decode/launch.h"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  const auto bytes = static_cast<std::size_t>(params.plan.shared_bytes);
  start("attention_forward", attention_decode_kernel<C>, {static_cast<unsigned>(grid), kThreads, bytes}, stream,
        params);
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

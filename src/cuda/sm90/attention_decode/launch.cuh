// Starts one instantiation.
#pragma once

#include <array>
#include <atomic>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_decode/kernel.cuh"
#include "cuda/sm90/attention_decode/launch.h"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  cuda::start("attention_forward", attention_decode_kernel<C>,
              {.blocks = static_cast<unsigned>(grid),
               .threads = kThreads,
               .shared_bytes = static_cast<std::size_t>(params.plan.shared_bytes),
               .cluster = static_cast<unsigned>(params.plan.cluster),
               .overlaps = true},
              stream, params);
}

// Asked once for each of the first devices and each size: the driver takes microseconds to answer.
template <class C>
int clusters_at_once(int size) {
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, 16> known{};  // the answer and one more
  const auto device = static_cast<std::size_t>(current_device().ordinal);
  std::atomic<int> unknown = 0;
  std::atomic<int>& answer = device < known.size() ? known[device][static_cast<std::size_t>(size)] : unknown;
  if (answer == 0) {
    const auto blocks = static_cast<unsigned>(size);
    const Grid grid{.blocks = blocks, .threads = kThreads, .shared_bytes = kHopperSharedBytes, .cluster = blocks};
    answer = cuda::clusters_at_once("attention_forward", attention_decode_kernel<C>, grid) + 1;
  }
  return answer - 1;
}

template <class C>
constexpr Variant variant() {
  return {.size = C::kSize,
          .row_tiles = C::kRowTiles,
          .warps = C::kWarpgroups ? 4 : 1,
          .keys = C::kWarpgroups ? kGroupKeys : kKeyTile,
          .panels = C::kPanels,
          .panel_elements = C::kPanelElements,
          .q_pitch = C::kQPitch,
          .q_rows = C::kQSwizzled ? kGroupRows : 1,
          .control_bytes = sizeof(Control),
          .merge_bytes = C::kMergeBytes,
          .launch = launch<C>,
          .clusters_at_once = clusters_at_once<C>};
}

}  // namespace heddle::cuda::sm90::attention_decode

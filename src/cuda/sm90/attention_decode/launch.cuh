// Starts one instantiation.
#pragma once

#include "cuda/common/clusters.cuh"
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

template <class C>
int clusters_at_once(int size) {
  static_assert(kMaxCluster <= ClustersAtOnce::kMost);
  static ClustersAtOnce known;
  return known.of(size, "attention_forward", attention_decode_kernel<C>,
                  {.threads = kThreads, .shared_bytes = kHopperSharedBytes});
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

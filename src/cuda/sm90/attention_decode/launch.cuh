// Starts one instantiation.
#pragma once

#include "cuda/common/clusters.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/sm90/attention_decode/kernel.cuh"
#include "cuda/sm90/attention_decode/variants.h"

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

// An e4m3 cache is widened to f16 on its way from shared memory to the registers.
template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr bool kE4m3 = kType == DType::f8e4m3;
  constexpr Row row = kE4m3 ? kE4m3Variants[kRow] : k16BitVariants[kRow];
  using C = Config<ElementOf<kE4m3 ? DType::f16 : kType>, row.tiles, kE4m3>;
  return {row,
          kType,
          C::kWarpgroups ? 4 : 1,
          C::kWarpgroups ? kGroupKeys : kKeyTile,
          C::kPanels,
          C::kPanelElements,
          C::kQPitch,
          C::kQSwizzled ? kGroupRows : 1,
          sizeof(Control),
          C::kMergeBytes,
          launch<C>,
          clusters_at_once<C>};
}

}  // namespace heddle::cuda::sm90::attention_decode

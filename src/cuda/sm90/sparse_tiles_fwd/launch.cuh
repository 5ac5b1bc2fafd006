// Starts one instantiation.
#pragma once

#include "cuda/sm90/attention_fwd/launch.cuh"
#include "cuda/sm90/sparse_tiles_fwd/variants.h"

namespace heddle::cuda::sm90::sparse_tiles_fwd {

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, attention_fwd::launch<attention_fwd::Config<ElementOf<kType>, row.tiles, 0, ListWalk<int>>>};
}

}  // namespace heddle::cuda::sm90::sparse_tiles_fwd

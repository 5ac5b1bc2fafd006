// Starts one instantiation.
#pragma once

#include "cuda/common/tile_lists/host.h"
#include "cuda/sm90/attention_bwd/launch.cuh"
#include "cuda/sm90/sparse_tiles_bwd/variants.h"

namespace heddle::cuda::sm90::sparse_tiles_bwd {

template <DType kType, int kRow>
attention_bwd::Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using C = attention_bwd::Config<ElementOf<kType>, row.tiles, attention_bwd::Option::kNone,
                                  ListWalk<int, tile_lists::kPartBits>>;
  static_assert(C::kTileK == tile_lists::kKeysOfTile);
  return {{row.name, row.tiles},       kType, C::kColumns, C::kTileQ, C::kTileK, attention_bwd::launch<C>,
          attention_bwd::round_sums<C>};
}

}  // namespace heddle::cuda::sm90::sparse_tiles_bwd

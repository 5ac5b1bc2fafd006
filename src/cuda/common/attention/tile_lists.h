// Lists of key tiles, for kernels whose walk over keys is a ListWalk. For host and device.
#pragma once

#include <concepts>
#include <cstdint>

#include "problem/key_walk.h"

namespace heddle::cuda {

// For each tile of query rows of each head (of each group of heads that share tiles) a list of tiles of keys.
struct TileLists {
  const std::int32_t* tiles;   // [B, H, q_tiles, length]
  const std::int32_t* counts;  // [B, H, q_tiles]
  std::int64_t length;
};

// The walk of a tile of rows: all of `band`, or what its list, of that number, names of it.
template <TileWalk Walk>
constexpr Walk walk_of(const TileLists& lists, std::int64_t list, const BandWalk<int>& band) {
  if constexpr (std::same_as<Walk, ListWalk<int>>) {
    return {lists.tiles + list * lists.length, lists.counts[list], band};
  } else {
    return band;
  }
}

}  // namespace heddle::cuda

// Lists of tiles, for GPU kernels whose walk is a ListWalk. Host and device.
#pragma once

#include <concepts>
#include <cstdint>

#include "problem/key_walk.h"

namespace heddle {

// For each tile of query rows of each head (of each group of heads that share tiles) ascending indices of tiles of
// keys; in a backward for each tile of keys of each kv head those of tiles of query rows, which all heads of the group
// have in common.
struct TileLists {
  const std::int32_t* tiles;   // [B, H, q_tiles, length]; backward: [B, Hkv, k_tiles, length]
  const std::int32_t* counts;  // the same without length
  std::int64_t length;
};

// The walk of a tile: all of `band`, or what its list, of that number, names of it.
template <TileWalk Walk>
constexpr Walk walk_of(const TileLists& lists, std::int64_t list, const BandWalk<int>& band) {
  if constexpr (std::same_as<Walk, ListWalk<int>>) {
    return {lists.tiles + list * lists.length, lists.counts[list], band};
  } else {
    return band;
  }
}

}  // namespace heddle

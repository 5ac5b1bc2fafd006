// Lists of tiles on a GPU, for kernels whose walk is a ListWalk.
#pragma once

#include <cstdint>

namespace heddle::cuda {

// For each tile of query rows of each head, ascending indices of tiles of keys; in a backward for each tile of keys of
// each kv head those of tiles of query rows, which all heads of the group have in common.
struct TileLists {
  const std::int32_t* tiles;   // [B, H, q_tiles, length]; backward: [B, Hkv, k_tiles, length]
  const std::int32_t* counts;  // the same without length
  std::int64_t length;
};

}  // namespace heddle::cuda

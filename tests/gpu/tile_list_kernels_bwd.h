// Backward kernels over lists of query tiles, which no candidate has yet: the library's sources with another walk over
// queries.
#pragma once

#include <cstdint>

#include "problem/attention.h"

namespace heddle::kit {

// Of bfloat16, head sizes to 64. tiles: [B, Hkv, tiles of tile_k keys, length] int32 on the GPU, ascending indices of
// tiles of tile_q rows; counts: how many of a list are there, [B, Hkv, tiles of keys].
struct ListedBackward {
  const char* candidate;  // which has the same tiles
  int tile_q, tile_k;
  std::size_t (*workspace)(const AttentionBackwardProblem& p);
  void (*launch)(const AttentionBackwardProblem& p, const std::int32_t* tiles, const std::int32_t* counts,
                 std::int64_t length, const Runtime& runtime);
};
extern const ListedBackward kListedBackwardSm80Plain, kListedBackwardSm80Options;
extern const ListedBackward kListedBackwardSm90Plain, kListedBackwardSm90Planes;

}  // namespace heddle::kit

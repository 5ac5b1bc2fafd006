// Kernels over lists of key tiles, which no candidate has yet: the library's sources with another walk over keys.
#pragma once

#include <cstdint>

#include "problem/attention.h"

namespace heddle::kit {

// A forward kernel of bfloat16, head sizes to 64. tiles: [B, H, tiles of tile_q rows, length] int32 on the GPU,
// ascending indices of tiles of tile_k keys; counts: how many of a list are there, [B, H, tiles of rows].
struct ListedForward {
  const char* name;
  int tile_q, tile_k;
  void (*launch)(const AttentionProblem& p, const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
                 void* stream);
};
extern const ListedForward kListedSm80Plain, kListedSm80Options;

}  // namespace heddle::kit

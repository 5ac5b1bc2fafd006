// Kernels over lists of key tiles, which no candidate has yet: the library's sources with another walk over keys.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "problem/attention.h"

namespace heddle::kit {

// A forward kernel. tiles: [B, H, tiles of tile_q rows, length] int32 on the GPU, ascending indices of tiles of tile_k
// keys; counts: how many of a list are there, [B, H, tiles of rows]. Where heads share tiles of rows, there are fewer
// lists.
struct ListedForward {
  const char* candidate;  // whose kernel it is, but for the walk
  std::string_view name;  // the variant's
  int tile_q, tile_k;
  void (*launch)(const AttentionProblem& p, const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
                 void* stream);
};
extern const ListedForward kListedSm80Plain, kListedSm80Options;  // of bfloat16, head sizes to 64

// Of bfloat16, and of e4m3 with an output of it. Few CTAs take all tiles of rows, each several.
std::span<const ListedForward> listed_on_hopper();

}  // namespace heddle::kit

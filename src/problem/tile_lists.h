// Lists of tiles, for GPU kernels whose walk is a ListWalk. Host and device.
#pragma once

#include <concepts>
#include <cstdint>

#include "problem/key_walk.h"

namespace heddle {

// For each tile of query rows of each head (of each group of heads that share tiles) ascending indices of tiles of
// keys; in a backward for each tile of keys of each kv head those of tiles of query rows, which all heads that a block
// of threads goes through have in common. Neighbouring tiles and heads may share a list.
struct TileLists {
  const std::int32_t* tiles;
  const std::int32_t* counts;  // of each list
  // Where each list begins in `tiles`; or null: list n at n * length.
  const std::int32_t* begins;
  std::int64_t length;
  // Tile t of head (or group) h of a sequence has list
  //   first + h / heads_of_list * stride_h + t / tiles_of_list * stride_t,
  // first = s * stride_s of sequence s, or, where rows_of_list is not 0, (row / rows_of_list + s) * stride_t of one
  // that begins at that row of packed data: so its lists begin at a place that needs no sum over the others.
  std::int64_t stride_s, stride_h, stride_t;
  int heads_of_list = 1, tiles_of_list = 1, rows_of_list = 0;
  // Of each entry of `tiles`, in a backward whose sums of a tile of rows take turns: how many tiles of keys that have
  // it, too, come before. Or null.
  const std::int32_t* places = nullptr;

  constexpr std::int64_t number(int sequence, int row, int head, int tile) const {
    const std::int64_t first =
        rows_of_list > 0 ? (std::int64_t{row / rows_of_list} + sequence) * stride_t : sequence * stride_s;
    return first + head / heads_of_list * stride_h + tile / tiles_of_list * stride_t;
  }
  constexpr const std::int32_t* list(std::int64_t number) const {
    return tiles + (begins != nullptr ? begins[number] : number * length);
  }
};

// One for each of the `of_head` tiles of each of `heads` heads in each sequence: tiles [B, heads, of_head, length],
// counts [B, heads, of_head].
constexpr TileLists a_list_a_tile(const std::int32_t* tiles, const std::int32_t* counts, std::int64_t length,
                                  std::int64_t heads, std::int64_t of_head) {
  return {.tiles = tiles,
          .counts = counts,
          .begins = nullptr,
          .length = length,
          .stride_s = heads * of_head,
          .stride_h = of_head,
          .stride_t = 1};
}

// The walk of a tile: all of `band`, or what its list, of that number, names of it.
template <TileWalk Walk>
constexpr Walk walk_of(const TileLists& lists, std::int64_t list, const BandWalk<int>& band) {
  if constexpr (std::same_as<Walk, BandWalk<int>>) {
    return band;
  } else {
    return {lists.list(list), lists.counts[list], band};
  }
}

}  // namespace heddle

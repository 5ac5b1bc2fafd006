// Which rows of q meet which block of keys, as the kernels over lists are told. A (list, head unit, slot) is a pair:
// the rows of a list meet the block that the slot names. A head unit is what has a list of its own: a kv head with its
// group of query heads, or one query head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/divisor.h"
#include "cuda/common/sparse/place.h"
#include "problem/sparse.h"

namespace heddle::cuda::sparse {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffff;
// A block of more keys has several tiles, each of them a CTA's.
constexpr int kTileKeys = 64;

// A pair that names a block: its list's first row in the sequence, and its first query head.
struct Named {
  int pair, row, head;
};

// One CTA's work: `count` pairs, from named[first] on, that name a block of a sequence.
struct Item {
  int b, kv_head, block;
  int first, count;
  int nth;  // of the block's items
};

struct Index {
  SparseProblem problem;
  int units, group;  // head units; query heads of each
  int kv_units;      // head units of a kv head
  int rows;          // of a pair: group * lists.query_rows
  Divisor by_rows, by_group;
  int slots;      // of a list
  int subs;       // tiles of a block's keys
  int tile_keys;  // of one: min(block size, kTileKeys)
  int pairs_of_item;
  int lists_of_tile;    // that one warp counts
  std::int64_t first;   // list of this launch
  std::int64_t count;   // of lists
  std::int64_t blocks;  // of a kv head, over all sequences. Block n of kv head h has the number h * blocks + n

  int* tile_counts;  // [tiles, numbers]: pairs of a tile of lists that name a block; then, of all tiles before it
  int* counts;       // [numbers]: pairs that name a block
  int* begins;       // [numbers]: where they begin in `named`
  int* item_begins;  // [numbers]
  int* items_there;  // [1]
  int* block_of;     // [pairs]: number
  int* place_of;     // [pairs]: among those of its tile that name the same; -1 for one that says nothing
  Named* named;      // [pairs], by block, and there in the order of pairs
  Item* items;       // [item_limit]

  constexpr std::int64_t numbers() const { return problem.Hkv * blocks; }
  constexpr std::int64_t tiles() const { return (count + lists_of_tile - 1) / lists_of_tile; }

  using Place = sparse::Place;
  constexpr Place place(std::int64_t list) const { return place(list, problem.lists.query_rows); }
  constexpr Place place(std::int64_t n, std::int64_t share) const { return place_of_tile(problem, n, share); }

  // Keys of lists have steps of 1: a constant, so that nothing is divided.
  constexpr Band band(const Sequence& s) const {
    Band band = problem.band(s);
    band.key_step = 1;
    return band;
  }

  // Keys that rows of a list meet, and whether the block has some of them.
  constexpr Interval<std::int64_t> met(const Place& w) const {
    return w.there ? band(w.s).keys_of({w.row, w.row + problem.lists.query_rows}) : Interval<std::int64_t>{};
  }
  constexpr bool meets(const Interval<std::int64_t>& met, std::int64_t block) const {
    const std::int64_t size = problem.lists.block_size;
    return block >= 0 && block * size < met.end && (block + 1) * size > met.begin;
  }

  // The number, within a kv head, of block 0 of a sequence.
  constexpr std::int64_t first_block(std::int64_t b, const Sequence& s) const {
    const std::int64_t size = problem.lists.block_size;
    return problem.cu_seqlens_k.given ? s.k_begin / size + b : b * ((problem.Sk + size - 1) / size);
  }
};

}  // namespace heddle::cuda::sparse

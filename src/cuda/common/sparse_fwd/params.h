// What the kernels of attention over lists are told beside which rows meet which block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse_fwd {

using sparse::Item;
using sparse::kWarp;

using sparse::kTileKeys;

constexpr int kGroupRows = 16;  // of mma.sync, and of a warp's share of wgmma

// Of an item: rows of q that one CTA multiplies with one tile of keys, and positions that have them.
constexpr int kItemRows = 1024, kItemPositions = 256;

// Neighbouring lists of which a warp each goes through the blocks that any of them names, and of how many entries and
// blocks of a sequence they may be (Hopper).
constexpr int kListsTogether = 16, kMostEntriesTogether = kWarp, kMostBlocksTogether = 1 << 15;

// By rows, of lists by offsets: blocks that a CTA goes through at a time, and those that a sequence may have.
constexpr int kSlotsAtOnce = 512, kMostBlocksByRows = 1 << 15;

struct Params : sparse::Index {
  bool by_rows;  // rows of a list go through its blocks, and there is no index
  int parts;  // partial results of a row: each slot's tiles of keys, or by rows, CTAs that share a list; 1: none then
  int row_tiles, block_log2;  // by rows: of a list; of a block's keys
  Divisor by_page;            // of keys in pages: blocks of a page
  float scale_log2;
  bool o_pairs;  // two neighbouring elements of o may be written at once

  // Over one tile of keys alone, normalised, each 32 columns relative to their scale, in the order of mma's fragments.
  // In rounds [pairs, tiles of a block's keys] are in the place of the first three extents.
  __half* partial;  // [lists, units, parts, rows, head size]
  float* scales;    // [lists, units, parts, rows, head size / 32]
  float* lse;       // [lists, units, parts, rows], natural; of a row without keys -inf, and nothing else is read of it
};

}  // namespace heddle::cuda::sparse_fwd

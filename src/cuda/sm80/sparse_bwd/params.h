// What the kernels of the backward of attention over lists are told beside which rows meet which block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sm80::sparse_bwd {

using sparse::Item;
using sparse::kTileKeys;
using sparse::kWarp;
using sparse::Named;

// Of an item: rows of q and d_o that one CTA takes through a tile of keys, and pairs.
constexpr int kItemRows = 2048, kItemPairs = 256;

struct Params : sparse::Index {
  Operand d_o, dq, dk, dv;
  const float *lse_log2, *delta;  // as attention_bwd_rows wrote them
  std::int64_t rows_per_head;
  float scale_log2;
  bool dq_pairs, key_pairs;  // two neighbouring elements of dq, and of dk and dv, may be written at once

  // dK and then dV of a tile of keys, in fragments of 16 x 8 as mma.sync has them.
  float* sums;  // [numbers, subs, 2, tile_keys, head size]: of all launches so far
  float*
      others;  // [pairs / pairs_of_item + 1, subs, 2, tile_keys, head size]: of items that are not their block's first
  // dQ over one tile of keys alone, each 32 columns relative to their largest, in the order of mma's fragments.
  __half* partial;  // [pairs, subs, rows, head size]
  float* scales;    // [pairs, subs, rows, head size / 32]

  // Among `others`: items of a block that follow its first begin pairs_of_item after one another, and those of the next
  // block as far behind its first one.
  __device__ std::int64_t other(const Item& item) const { return item.first / pairs_of_item; }
};

}  // namespace heddle::cuda::sm80::sparse_bwd

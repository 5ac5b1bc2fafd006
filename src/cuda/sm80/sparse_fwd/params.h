// What the kernels of attention over lists are told beside which rows meet which block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm80/sparse/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

using sparse::Item;
using sparse::kWarp;
using sparse::Named;

using sparse::kTileKeys;

// Of an item: rows of q that one CTA multiplies with one tile of keys, and pairs.
constexpr int kItemRows = 1024, kItemPairs = 256;

struct Params : sparse::Index {
  bool direct;  // each pair is an item, and there is no index
  float scale_log2;
  bool o_pairs;  // two neighbouring elements of o may be written at once

  // Over one tile of keys alone, each 32 columns relative to their largest, in the order of mma's fragments.
  __half* partial;  // [pairs, subs, rows, head size]
  float* scales;    // [pairs, subs, rows, head size / 32]: what makes of them the normalised output
  float* lse;       // [pairs, subs, rows], natural; of a row without keys -inf, and nothing else is read of it
};

}  // namespace heddle::cuda::sm80::sparse_fwd

// What the kernels of attention over lists are told beside which rows meet which block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm80/sparse/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

using sparse::Item;
using sparse::kWarp;
using sparse::Named;

constexpr int kItemRows = 256;  // of an item: rows of q that one CTA multiplies with one block

struct Statistics {
  float lse, scale;  // natural; what the row of halves is multiplied with
};

struct Params : sparse::Index {
  float scale_log2;
  bool o_pairs;  // two neighbouring elements of o may be written at once

  Statistics* statistics;  // [pairs, rows]; of a row without keys lse is -inf
  __half* partial;         // [pairs, rows, head size], normalised, in the order of mma's fragments
};

}  // namespace heddle::cuda::sm80::sparse_fwd

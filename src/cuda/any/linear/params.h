// What launches of the linear layers' kernels have in common: what they write, and who computes what.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "lowbit/fragments.h"

namespace heddle::cuda::linear {

using lowbit::kBlockColumns, lowbit::kBlockRows;

// y[m, n] = activation(row_scales[n] * token_scales[m] * sum + bias[n]) + residual[m, n]. swiglu: in each 16 rows the
// first 8 are gates, the others the ups of the same outputs; output j has the bias's elements 2 j and 2 j + 1.
struct Output {
  const float* row_scales;      // [N], rounded up to whole blocks
  const float* token_scales;    // [M], or null: 1
  const void *bias, *residual;  // [N] and [M, n], of y's type, or null
  void* y;
  std::int64_t residual_stride, y_stride;  // of rows, in elements
  int m, n;                                // n: outputs
  Activation activation;
};

// How the work is dealt out. The sums are tiles of rows and tokens; a unit is one step along K of a tile. Of the first
// `shared_tiles` tiles each CTA has the same number of units, one after the other, whatever tiles they belong to, but
// of at most two; of the others it has whole tiles, every grid-th. CTAs that share a tile leave their sums in
// `partials`, and each finishes some of its tokens, in slices of 16: the last one the first slice, the one before it
// the second... Where CTAs of a cluster share a tile, `cluster` of them have it and nothing else.
struct Schedule {
  int units;                 // of a tile
  int k_blocks, row_blocks;  // of the weights
  int row_tiles, tiles, shared_tiles, cluster;
  float4* partials;  // [CTA][its first or second tile][block of 64 rows][slice][accumulators of a slice / 4][128]
  std::uint64_t*
      marks;           // [CTA][first or second][warpgroup][slice]: `mark` where partials are there, till they are read
  std::uint64_t mark;  // of this launch, such that no memory has it by chance
};

}  // namespace heddle::cuda::linear

// What a launch tells the kernel.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>

#include "lowbit/fragments.h"

namespace heddle::cuda::sm90::linear_w4a16 {

using lowbit::kBlockColumns, lowbit::kBlockRows;
using WeightBlock = lowbit::FragmentBlock;
constexpr int kSteps = WeightBlock::kSteps;

// kSwiglu: outputs are half as many as rows, silu(gate) * up. In each 16 rows the first 8 are gates, the others the ups
// of the same outputs; output j has the bias's elements 2 j and 2 j + 1.
enum class Activation { kNone, kRelu, kGeluErf, kGeluTanh, kSilu, kSwiglu };

// y[m, n] = activation(row_scales[n] * token_scales[m] * sum + bias[n]) + residual[m, n]
struct Output {
  const float* row_scales;      // [N], rounded up to whole blocks
  const float* token_scales;    // [M], or null: 1
  const void *bias, *residual;  // [N] and [M, n], of y's type, or null
  void* y;
  std::int64_t residual_stride, y_stride;  // of rows, in elements
  int m, n;                                // n: outputs
  Activation activation;
};

// How the work is dealt out. The sums are tiles of rows and tokens, and units of one block of columns of a tile. Of the
// first `shared_tiles` tiles each CTA has the same number of units, one after the other, whatever tiles they belong to;
// of the others it has whole tiles, every grid-th. The CTA that has a tile's last columns finishes the tile; one that
// has others of them leaves its sums in `partials`.
struct Schedule {
  int k_blocks, row_blocks;  // of the weights
  int row_tiles, tiles, shared_tiles;
  float4* partials;      // [CTA][block of 64 rows][accumulators / 4][128]
  std::uint64_t* marks;  // [CTA][warpgroup]: `mark` where partials are there, till they are read
  std::uint64_t mark;    // of this launch, such that no memory has it by chance
};

struct Params {
  CUtensorMap x;  // [M, K], boxes of 64 columns
  const WeightBlock* weights;
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear_w4a16

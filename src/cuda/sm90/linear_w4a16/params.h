// What a launch tells the kernel, and how weights lie in memory.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::sm90::linear_w4a16 {

// Weights [N, K] in blocks of 64 rows and 128 columns, [N / 64][K / 128]; what is missing of the last ones is zero.
constexpr int kBlockRows = 64, kBlockColumns = 128, kGroup = 16, kSteps = kBlockColumns / 16;

// A block as a warpgroup reads it: thread t has 8 weights of a product's step of 16 columns in one word, those that the
// product wants in its four operand registers (wgmma.cuh), E2M1 each. The halves of the word are the two elements of a
// register; in each, bit 15 and bits 8 to 6 are sign and magnitude of register 0, bits 12 and 5 to 3 of register 1,
// bits 9 and 2 to 0 of register 2, bits 14, 13, 11 and 10 of register 3. So most of them are one shift and one mask
// away from a bfloat16, times 2^-126.
struct WeightBlock {
  std::uint32_t codes[kSteps / 4][128][4];  // a thread's words of four steps side by side
  // Of 16 columns of a row: 5 bits of exponent, 3 of mantissa, (1 + m / 8) 2^(e - 15). An E4M3 scale times 2^7,
  // exactly, also where that is subnormal.
  std::uint8_t scales[kBlockRows][kBlockColumns / kGroup];
};
static_assert(sizeof(WeightBlock) == 4608);

constexpr float kScaleFactor = 128;  // of the scales stored

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

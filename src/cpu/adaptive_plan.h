// What the tasks of attention with a tolerance are given: rows, and what was found of each block of values before.
#pragma once

#include <cstdint>

#include "cpu/plan.h"
#include "problem/adaptive.h"

namespace heddle::cpu {

constexpr std::int64_t kBlocksOfTile = kKeyBlock / kAdaptiveKeys;  // blocks of keys in a tile of keys

// How far the values of a block lie from their mean c (docs/numerics.md). As they are found, in units of 2^exponent;
// then in units of the longest value of the kv head.
struct ValueBlock {
  float radius = 0;   // largest |v_j - c|; infinite: the block is never replaced
  float width = 0;    // at least the largest singular value of the rows v_j - c
  float longest = 0;  // largest |v_j|, rounded down
  std::int32_t exponent = 0;
};

// What a mean lacks for being summed in float32: the sum of the centred values is at most n_b times this, in units of
// the longest value. n + 1 roundings of 2^-24 for n = 32 values.
constexpr float kMeanRounding = 0x1p-18f;
// Factor that the bound of a row takes for the roundings of its own sums, over so many tiles of keys. A tile has 9 of
// 2^-24: the costs' shrinking and a sum for each of 4 blocks, and the exponentials' 3 sums of blocks and one more.
// Those of one block's sums are below 2^-18 together.
inline double adaptive_outward(std::int64_t tiles) { return 1 + 0x1p-18 + static_cast<double>(tiles) * 0x1p-20; }

struct AdaptiveTask {
  std::int64_t b = 0, kv_head = 0;
  std::int64_t row_begin = 0, row_end = 0;  // in [0, sq * G)
  const ValueBlock* values = nullptr;       // of the kv head's blocks
  const float* means = nullptr;             // [block][Dv padded]
  float limit = 0;                          // most that a row's replaced error may be, over its sum
  double outward = 1;                       // what the bound is multiplied with
};

// f32 of one mean.
inline std::int64_t mean_width(const AttentionProblem& p) { return round_up(p.Dv, 16); }

}  // namespace heddle::cpu

// What a launch tells the kernel, and how weights lie in memory.
#pragma once

#include "cuda/sm90/linear_w4a16/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

using linear_w4a16::kBlockColumns;
using linear_w4a16::kBlockRows;
using linear_w4a16::Output;
using linear_w4a16::Schedule;

constexpr int kStepColumns = 32, kSteps = kBlockColumns / kStepColumns;

// A block of 64 rows and 128 columns as a warpgroup reads it. Of a product's step of 32 columns thread t has 16 weights
// in two words, E2M1 each: one word for each of its two rows, of which the operand has two registers of four bytes
// (wgmma.cuh). In a word, nibbles 0 to 3 hold the magnitudes of the first register's bytes, nibbles 4 to 7 those of the
// second's; the signs of the first's stand in bit 3 of nibbles 1, 3, 5 and 7, those of the second's in nibbles 0, 2, 4
// and 6: at the place of an E4M3's sign, and four bits below.
struct WeightBlock {
  std::uint32_t codes[kSteps / 2][128][4];  // a thread's words of two steps side by side
  // Of 32 columns of a row, 0 to kMaxExponent: weights are row_scale * 2^exponent * code, times 2^-5 in E4M3.
  std::uint8_t exponents[kBlockRows][kSteps];
};
static_assert(sizeof(WeightBlock) == 4352);

constexpr int kMaxExponent = 11;

struct Params {
  CUtensorMap x;  // e4m3 [M, K], boxes of 128 columns
  const WeightBlock* weights;
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear_w4a8

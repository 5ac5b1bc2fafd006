// exp(x - base) for the logits x of a row, by one multiply-add and one power of two each.
//
// A bias may be as large as numbers are (masks of the lowest finite one), and log2 units would not hold it. Rows with
// such a base are told by kLargeLogit: what else was in their logits is lost in rounding, so that two of them are equal
// or 2^76 and more apart, and any unit does in which neither overflows.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda {

constexpr float kLog2OfE = 1.44269504088896341f;
constexpr float kLargeLogit = 0x1p100f;

// What the largest logits of a row are multiplied with, for exponents of two.
__device__ inline float exponent_unit(float base) { return fabsf(base) < kLargeLogit ? kLog2OfE : 0x1p-60f; }

// exp(x - y), where x <= y or they are near. -inf less a finite number is fine.
__device__ inline float exp_of_difference(float x, float y) { return ptx::exp2_approx((x - y) * kLog2OfE); }

}  // namespace heddle::cuda

// exp(x - y) for natural logits.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda {

// Subtracts first: with a bias of -1e9 at all of a row's keys, its largest logit times log2(e) is rounded by up to 64,
// and a multiply-add of x would make that a factor of 2^64. -inf less a finite number is fine.
__device__ inline float exp_of_difference(float x, float y) { return ptx::exp2_approx((x - y) * kLog2e); }

}  // namespace heddle::cuda

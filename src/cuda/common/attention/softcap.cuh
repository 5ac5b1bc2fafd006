// softcap * tanh(x / softcap) by one exponential, as tanh(y) = 1 - 2 / (e^2y + 1); its error is 2^-22 of softcap, not
// of x: for 16-bit operands. to_exponent: what makes 2 y log2(e) of x. Two ways to round: each kernel keeps its bits.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda {

// In one fused step after the division. twice: 2 softcap.
__device__ inline float capped_by_fma(float x, float to_exponent, float softcap) {
  const float inverse = __fdividef(1.0f, ptx::exp2_approx(x * to_exponent) + 1.0f);
  return fmaf(-2.0f * softcap, inverse, softcap);
}
// In a division and a difference.
__device__ inline float capped(float x, float to_exponent, float twice) {
  return 0.5f * twice - __fdividef(twice, 1.0f + ptx::exp2_approx(x * to_exponent));
}

}  // namespace heddle::cuda

// Softmax of a key tile, with P in the range of e4m3.
//
// Maxima are needed so that nothing overflows, not for exactness: any number near a row's largest score will do. So the
// maximum of a row is taken from its first tile, and later tiles are exponentiated without asking for theirs. Their
// sums, which are wanted anyway, tell whether that went well.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention/rows.cuh"
#include "cuda/sm90/attention_fwd_fp8/config.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

using attention::row_maximum;

// P is exp2(s - max + kShift): 2^3 at the maximum, and no more than 448, e4m3's largest, if a thread's share of a row,
// 32 elements, has at most kLargestSum. Equal scores sum to 256. Below 2^-9 of the maximum P is subnormal.
constexpr float kShift = 3, kLargestSum = 430;

// Always true, but not before this sum of exponentials is computed. The assembler moves exponentials behind all that
// does not need their results; what asks this function does. (The sum is compared with a subnormal number, which it
// never is; the assembler cannot know that.)
__device__ inline bool known(float sum) {
  std::uint32_t subnormal;
  asm volatile("{\n .reg .pred p;\n setp.eq.f32 p, %1, 0f00000200;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(subnormal)
               : "f"(sum));
  return subnormal == 0;
}

// Turns elements [kFrom, kTo) of s, in place, into exp2(s * scale - max + shift), and adds each row's to its sum.
template <int kFrom, int kTo, int kCount>
__device__ inline void exponentiate(float (&s)[kCount], const RowState& state, const float (&scale)[2], float shift,
                                    float (&sum)[2]) {
  const float base[2] = {shift - state.max[0], shift - state.max[1]};
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) {
    s[i] = ptx::exp2_approx(fmaf(s[i], scale[i / 2 % 2], base[i / 2 % 2]));
    sum[i / 2 % 2] += s[i];
  }
}

// With the exact maxima of this tile and those before; s: logits in log2 units. Returns by `correction` what O must be
// multiplied with.
template <int kCount>
__device__ inline void exact_softmax(float (&s)[kCount], RowState& state, float (&correction)[2], float shift) {
  RowState finite;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = state.max[r];
    state.max[r] = fmaxf(before, row_maximum(s, r));
    finite.max[r] = state.max[r] == -INFINITY ? 0.0f : state.max[r];
    correction[r] = ptx::exp2_approx(before - finite.max[r]);
  }
  float sum[2] = {};
  exponentiate<0, kCount>(s, finite, {1.0f, 1.0f}, shift, sum);
  state.sum[0] = state.sum[0] * correction[0] + sum[0];
  state.sum[1] = state.sum[1] * correction[1] + sum[1];
}

// For exponentials that are finite, but too large: brings those of rows with more than 2^shift back to that.
template <int kCount>
__device__ inline void lower(float (&s)[kCount], RowState& state, float (&correction)[2], const float (&sum)[2],
                             float shift) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float above = fmaxf(ptx::log2_approx(row_maximum(s, r)) - shift, 0.0f);
    state.max[r] += above;
    correction[r] = ptx::exp2_approx(-above);
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      s[i] *= correction[r];
      s[i + 1] *= correction[r];
    }
    state.sum[r] = (state.sum[r] + sum[r]) * correction[r];
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

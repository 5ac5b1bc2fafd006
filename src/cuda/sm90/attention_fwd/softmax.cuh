// The softmax of a key tile's accumulators, and the ways in which they are logits.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/attention/rows.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// x * factor + offset.
struct Line {
  float factor, offset;
  __device__ float operator()(float x) const { return fmaf(x, factor, offset); }
};

// How accumulators x become logits. logit(x, row) is the logit, in units of kLog2 (1: log2; log2(e): natural);
// above(row, base) gives a function from x to log2 of exp(logit - base).
struct Scaled {
  static constexpr float kLog2 = 1.0f;
  float scale;
  __device__ float logit(float x, int /*row*/) const { return x * scale; }
  __device__ Line above(int /*row*/, float base) const { return {scale, -base}; }
};
struct Shifted {
  static constexpr float kLog2 = 1.0f;
  float scale, shift[2];
  __device__ float logit(float x, int row) const { return fmaf(x, scale, shift[row]); }
  __device__ Line above(int row, float base) const { return {scale, shift[row] - base}; }
};
// For scores with a bias, which may be large. The offset (shift - base) log2(e) is rounded: that multiplies all P of a
// row by the same factor, which their sum cancels. Below kLargeLogit the factor is at most 2^(1/128); far above, P
// would overflow or vanish.
constexpr float kLargeLogit = 0x1p17f;
struct Biased {
  static constexpr float kLog2 = kLog2e;
  float scale, shift[2];
  __device__ float logit(float x, int row) const { return fmaf(x, scale, shift[row]); }
  __device__ Line above(int row, float base) const { return {scale * kLog2e, (shift[row] - base) * kLog2e}; }
};
// For careful tiles: as Biased, but rows with a larger base subtract before they scale, which is exact.
struct Distant {
  static constexpr float kLog2 = kLog2e;
  const Biased& biased;
  __device__ float logit(float x, int row) const { return biased.logit(x, row); }
  __device__ auto above(int row, float base) const {
    return [this, row, base, line = biased.above(row, base)](float x) {
      return fabsf(base) < kLargeLogit ? line(x) : (logit(x, row) - base) * kLog2e;
    };
  }
};
// By Softcap's series.
struct Capped {
  static constexpr float kLog2 = 1.0f;
  const float (&series)[4];
  __device__ float factor(float x) const {
    const float square = x * x;
    return fmaf(fmaf(fmaf(series[3], square, series[2]), square, series[1]), square, series[0]);
  }
  __device__ float logit(float x, int /*row*/) const { return x * factor(x); }
  __device__ auto above(int /*row*/, float base) const {
    return [this, base](float x) { return fmaf(x, factor(x), -base); };
  }
};

// Raises the maximum of a thread's row r to that of its new logits. Returns the base that exponents are relative to;
// `correction` is what O must be multiplied with.
template <class Logits, int kCount>
__device__ __forceinline__ float raise_maximum(const float (&s)[kCount], RowState& state, float (&correction)[2], int r,
                                               const Logits& logits) {
  const float top = logits.logit(attention::row_maximum(s, r), r);
  const float before = state.max[r];
  if (top > before + kRescaleLog2 / Logits::kLog2) state.max[r] = top;
  const float base = state.max[r] == -INFINITY ? 0.0f : state.max[r];
  correction[r] = ptx::exp2_approx((before - base) * Logits::kLog2);
  return base;
}

// Turns s, in place, into exp(logit - max) and brings the rows' maxima and sums up to date. Returns by `correction`
// what O must be multiplied with. Logits must grow with s. kMaximaFirst: the maxima of both rows, then the
// exponentials, which the compiler would else mix: at head size 64 with a bias or mask, mixed ones take 3 to 5 %
// longer; without either, no less.
template <bool kMaximaFirst = false, class Logits, int kCount>
__device__ __forceinline__ void softmax(float (&s)[kCount], RowState& state, float (&correction)[2],
                                        const Logits& logits) {
  float base[2];
  if constexpr (kMaximaFirst) {
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = raise_maximum(s, state, correction, r, logits);
    asm volatile("" : "+f"(base[0]), "+f"(base[1]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (!kMaximaFirst) base[r] = raise_maximum(s, state, correction, r, logits);
    const auto exponent = logits.above(r, base[r]);
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      s[i] = ptx::exp2_approx(exponent(s[i]));
      s[i + 1] = ptx::exp2_approx(exponent(s[i + 1]));
      sum0 += s[i];
      sum1 += s[i + 1];
    }
    state.sum[r] = state.sum[r] * correction[r] + (sum0 + sum1);
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

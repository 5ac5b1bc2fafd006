// 16-bit words of a bias as floats, and ALiBi, on a consumer's accumulators s of a key tile.
#pragma once

#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention/rows.cuh"
#include "cuda/sm90/attention_fwd/config.h"

namespace heddle::cuda::sm90::attention_fwd {

using attention::ThreadRows;

template <class T>
__device__ float2 to_float2(std::uint32_t word);
template <>
__device__ inline float2 to_float2<__nv_bfloat16>(std::uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
}
template <>
__device__ inline float2 to_float2<__half>(std::uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// s = s unit - slope |distance of positions|, per row.
template <class C>
__device__ __forceinline__ void add_alibi(const Params& p, const Work& w, const ThreadRows& rows, int k_tile,
                                          const float (&slope)[2], float unit, float (&s)[C::kTileK / 2]) {
  const int column = k_tile * C::kTileK + 2 * (recomputed(static_cast<int>(threadIdx.x)) % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float down = -slope[r], distance = static_cast<float>(rows.position(p, r) + w.off - column);
#pragma unroll
    for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * r + c];
        x = fmaf(x, unit, down * fabsf(distance - static_cast<float>(8 * j + c)));
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

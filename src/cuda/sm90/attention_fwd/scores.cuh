// Rows, columns and the band of a consumer's accumulators s of a key tile.
#pragma once

#include <type_traits>

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

// The bits that are all set in NaN and infinity.
template <class T>
struct Exponent;
template <>
struct Exponent<__nv_bfloat16> {
  static constexpr unsigned kMask = 0x7F80;
};
template <>
struct Exponent<__half> {
  static constexpr unsigned kMask = 0x7C00;
};

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

// Which of its warpgroup's rows this thread works on: lane_row and lane_row + 8. first: the position of row 0.
struct ThreadRows {
  int first, lane_row;
  __device__ int position(const Params& p, int r) const { return first + ((lane_row + 8 * r) * p.pack_inverse >> 16); }
  __device__ int head(const Params& p, const Work& w, int r) const {
    const int row = lane_row + 8 * r;
    return (w.h - (row * p.pack_inverse >> 16)) * p.pack + row;
  }
};

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

// Causality, a window, and the end of the keys: each row attends one run of keys. Masking selects: whatever a masked
// score was, NaN included, it becomes -inf.
template <class C>
__device__ inline void mask_band(const Params& p, const Work& w, const ThreadRows& rows, int k_tile,
                                 float (&s)[C::kTileK / 2]) {
  const int column = k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = rows.position(p, r), i = position + w.off;
    const int begin = max(i - p.left, 0), end = position < w.used_rows ? min(i + p.right + 1, w.keys) : 0;
    const auto length = static_cast<unsigned>(max(end - begin, 0));
#pragma unroll
    for (int j = 0; j < C::kTileK / 8; ++j) {
      const auto from = static_cast<unsigned>(column - begin + 8 * j);
      if (from >= length) s[4 * j + 2 * r] = -INFINITY;
      if (from + 1 >= length) s[4 * j + 2 * r + 1] = -INFINITY;
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

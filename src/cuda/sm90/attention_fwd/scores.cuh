// From products q.k to logits: masks, and the score options. s as a consumer's accumulators of a key tile.
#pragma once

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

// Which of its warpgroup's rows this thread works on: lane_row and lane_row + 8. first: the position of row 0.
struct ThreadRows {
  int first, lane_row;
  __device__ int position(const Params& p, int r) const { return first + ((lane_row + 8 * r) * p.pack_inverse >> 16); }
  __device__ int head(const Params& p, const Work& w, int r) const {
    const int row = lane_row + 8 * r;
    return (w.h - (row * p.pack_inverse >> 16)) * p.pack + row;
  }
};

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

// Scale, softcap, ALiBi, bias, mask; logits come out in log2 units. Pairs outside the band are left to mask_band, and
// bias and mask are not read there.
template <class C>
__device__ inline void apply_score_options(const Params& p, const Work& w, const ThreadRows& rows, int k_tile,
                                           float (&s)[C::kTileK / 2]) {
  using T = typename C::Element;
  constexpr float kLog2e = 1.44269504088896341f;
  const int column = k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4);
  if (p.softcap > 0.0f) {
    // softcap tanh(x) = softcap (1 - 2 / (e^2x + 1)): the hardware's tanh is too coarse for a logit.
    const float to_exponent = 2.0f * kLog2e * p.scale / p.softcap, cap = p.softcap * kLog2e;
#pragma unroll
    for (float& x : s) {
      const float e = ptx::exp2_approx(x * to_exponent);
      x = fmaf(-2.0f * cap, __fdividef(1.0f, e + 1.0f), cap);
    }
  } else {
#pragma unroll
    for (float& x : s) x *= p.scale_log2;
  }
  if (p.alibi != nullptr) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float slope = kLog2e * p.alibi[w.sequence * p.alibi_stride_b + rows.head(p, w, r) * p.alibi_stride_h];
      const int distance = rows.position(p, r) + w.off - column;
#pragma unroll
      for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[4 * j + 2 * r + c] = fmaf(-slope, fabsf(static_cast<float>(distance - 8 * j - c)), s[4 * j + 2 * r + c]);
        }
      }
    }
  }
  if (p.bias.data == nullptr && p.mask.data == nullptr) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = rows.position(p, r);
    const bool used = position < w.used_rows;
    const auto offset = [&](const ScorePlane& plane) {
      return w.sequence * plane.stride_b + rows.head(p, w, r) * plane.stride_h + position * plane.stride_i +
             column * plane.stride_j;
    };
    if (p.bias.data != nullptr) {
      const std::int64_t at = offset(p.bias), step = p.bias.stride_j;
#pragma unroll
      for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (!used || column + 8 * j + c >= w.keys) continue;
          const std::int64_t here = at + (8 * j + c) * step;
          const float bias = p.bias_is_float ? static_cast<const float*>(p.bias.data)[here]
                                             : static_cast<float>(static_cast<const T*>(p.bias.data)[here]);
          s[4 * j + 2 * r + c] = fmaf(bias, kLog2e, s[4 * j + 2 * r + c]);
        }
      }
    }
    if (p.mask.data != nullptr) {
      const std::int64_t at = offset(p.mask), step = p.mask.stride_j;
#pragma unroll
      for (int j = 0; j < C::kTileK / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (!used || column + 8 * j + c >= w.keys) continue;
          if (static_cast<const unsigned char*>(p.mask.data)[at + (8 * j + c) * step] == 0) {
            s[4 * j + 2 * r + c] = -INFINITY;
          }
        }
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

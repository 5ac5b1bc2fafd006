// From products q.k to logits: masks, and the score options. s as a consumer's accumulators of a key tile.
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

// A plane's elements at a thread's rows and columns of a key tile. What lies outside the used rows and keys is not
// read; those pairs are outside the band, too.
template <class C>
class PlaneElements {
 public:
  static constexpr int kPairs = C::kTileK / 8;

  __device__ PlaneElements(const ScorePlane& score_plane, const Params& p, const Work& w, const ThreadRows& rows,
                           int k_tile)
      : plane(score_plane), column(k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4)), keys(w.keys) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = min(rows.position(p, r), w.used_rows - 1);
      row[r] = w.sequence * plane.stride_b + rows.head(p, w, r) * plane.stride_h + position * plane.stride_i;
    }
  }
  // Whether whole words may be read at all columns.
  __device__ bool whole() const { return plane.pairs && column / C::kTileK * C::kTileK + C::kTileK <= keys; }

  // Word: two elements.
  template <class Word>
  __device__ Word pair(int r, int j) const {
    return *reinterpret_cast<const Word*>(static_cast<const char*>(plane.data) +
                                          (row[r] + column + 8 * j) * (sizeof(Word) / 2));
  }
  template <class T>
  __device__ T element(int r, int j, int c) const {
    return static_cast<const T*>(plane.data)[row[r] + (column + 8 * j + c) * plane.stride_j];
  }
  __device__ bool exists(int j, int c) const { return column + 8 * j + c < keys; }

 private:
  const ScorePlane& plane;
  const int column, keys;
  std::int64_t row[2];
};

// Bias or mask of a key tile, loaded while its products run. Only what is read as pairs of 16-bit biases or of mask
// bytes; the rest is read when it is needed.
template <class C>
struct Prefetched {
  std::uint32_t words[2][C::kTileK / 8];
  bool bias = false, mask = false;

  __device__ void load(const Params& p, const Work& w, const ThreadRows& rows, int k_tile) {
    bias = mask = false;
    if (w.used_rows == 0 || w.keys == 0) return;
    if (p.bias.data != nullptr) {
      if (p.bias_is_float) return;
      const PlaneElements<C> elements(p.bias, p, w, rows, k_tile);
      if (!elements.whole()) return;
      bias = true;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < C::kTileK / 8; ++j) words[r][j] = elements.template pair<std::uint32_t>(r, j);
      }
    } else if (p.mask.data != nullptr) {
      const PlaneElements<C> elements(p.mask, p, w, rows, k_tile);
      if (!elements.whole()) return;
      mask = true;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < C::kTileK / 8; ++j) words[r][j] = elements.template pair<std::uint16_t>(r, j);
      }
    }
  }
};

// Scale, softcap, ALiBi, bias, mask; logits come out in log2 units. Pairs outside the band are left to mask_band.
template <class C>
__device__ inline void apply_score_options(const Params& p, const Work& w, const ThreadRows& rows, int k_tile,
                                           const Prefetched<C>& prefetched, float (&s)[C::kTileK / 2]) {
  using T = typename C::Element;
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr int kPairs = C::kTileK / 8;
  if (p.softcap > 0.0f) {
    const float cap = p.softcap * kLog2e;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // The hardware's tanh is right to 2^-11: finer than bfloat16, but not than float16.
      const float inside = p.scale / p.softcap;
#pragma unroll
      for (float& x : s) x = cap * ptx::tanh_approx(x * inside);
    } else {
      const float to_exponent = 2.0f * kLog2e * p.scale / p.softcap;  // tanh(x) = 1 - 2 / (e^2x + 1)
#pragma unroll
      for (float& x : s) x = fmaf(-2.0f * cap, __fdividef(1.0f, ptx::exp2_approx(x * to_exponent) + 1.0f), cap);
    }
  } else {
#pragma unroll
    for (float& x : s) x *= p.scale_log2;
  }
  if (p.alibi != nullptr) {
    const int column = k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float slope = kLog2e * p.alibi[w.sequence * p.alibi_stride_b + rows.head(p, w, r) * p.alibi_stride_h];
      const int distance = rows.position(p, r) + w.off - column;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[4 * j + 2 * r + c] = fmaf(-slope, fabsf(static_cast<float>(distance - 8 * j - c)), s[4 * j + 2 * r + c]);
        }
      }
    }
  }
  if (prefetched.bias) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const float2 pair = to_float2<T>(prefetched.words[i % 2][i / 2]);
      s[2 * i] = fmaf(pair.x, kLog2e, s[2 * i]);
      s[2 * i + 1] = fmaf(pair.y, kLog2e, s[2 * i + 1]);
    }
  }
  if (prefetched.mask) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      const std::uint32_t word = prefetched.words[i % 2][i / 2];
      if ((word & 0xFF) == 0) s[2 * i] = -INFINITY;
      if ((word & 0xFF00) == 0) s[2 * i + 1] = -INFINITY;
    }
  }
  if (w.used_rows == 0) return;
  if (p.bias.data != nullptr && !prefetched.bias) {
    const PlaneElements<C> elements(p.bias, p, w, rows, k_tile);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (!elements.exists(i / 2, c)) continue;
        const float bias = p.bias_is_float ? elements.template element<float>(i % 2, i / 2, c)
                                           : static_cast<float>(elements.template element<T>(i % 2, i / 2, c));
        s[2 * i + c] = fmaf(bias, kLog2e, s[2 * i + c]);
      }
    }
  }
  if (p.mask.data != nullptr && !prefetched.mask) {
    const PlaneElements<C> elements(p.mask, p, w, rows, k_tile);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (elements.exists(i / 2, c) && elements.template element<unsigned char>(i % 2, i / 2, c) == 0) {
          s[2 * i + c] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

// From products q . k to logits, and dropout. A warp's scores of one key tile, s[group][n][4], lie as
// mma_16816 leaves them: element 2 r + c of block n is (row lane / 4 + 8 r of the group, key 8 n + 2 (lane % 4) + c).
//
// Masking selects: whatever a masked score was, NaN included, it becomes -inf.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/attention/softcap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/attention/params.h"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/attention/work.cuh"
#include "problem/philox.h"

namespace heddle::cuda::sm80::attention {

// Calls visit(score, i, j) for each score. row: the position of this lane's first row; key: that of its first column.
template <class C, class Visit>
__device__ inline void for_each_score(int row, int key, float (&s)[C::kGroups][C::kTileK / 8][4], Visit visit) {
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(s[g][n][i], row + kGroupRows * g + i / 2 * 8, key + 8 * n + i % 2);
    }
  }
}

// Causality, window and lengths: row i attends one run of keys. That is Band::reach() without a division or a branch,
// either of which costs registers that the loop around it needs. keys: all that there are, or that the tile's rows
// meet.
template <class C>
__device__ inline void mask_band(const Params& p, const Work& w, Interval<int> keys, int row, int key,
                                 float (&s)[C::kGroups][C::kTileK / 8][4]) {
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + kGroupRows * g + 8 * r, at = w.off + p.row_step * i, last = at + p.right;
      const int step = static_cast<int>(p.key_step.divisor);
      const int begin = max(p.key_step.quotient(max(at - p.left, 0) + step - 1), keys.begin);
      const int end = i < w.sq && last >= 0 ? min(p.key_step.quotient(last) + 1, keys.end) : 0;
      keep_keys<C::kTileK / 8>(begin, static_cast<unsigned>(max(end - begin, 0)), key,
                               [&](int n) { return &s[g][n][2 * r]; });
    }
  }
}

// Scale, softcap and ALiBi.
template <class C>
__device__ inline void scale_scores(const Params& p, const Work& w, int row, int key,
                                    float (&s)[C::kGroups][C::kTileK / 8][4]) {
  const AttentionProblem& a = p.problem;
  if (a.softcap > 0) {
    const float to_exponent = 2 * p.scale_log2 / a.softcap, twice = 2 * a.softcap;
    for_each_score<C>(row, key, s, [=](float& x, int, int) {
      if constexpr (Float32<C>) {
        x = 0.5f * twice * tanhf(x * (to_exponent * (0.5f / kLog2e)));
      } else {
        x = capped(x, to_exponent, twice);
      }
    });
  } else {
    for_each_score<C>(row, key, s, [&](float& x, int, int) { x *= a.scale; });
  }
  if (a.alibi.data != nullptr) {
    const float slope = reinterpret_cast<const float*>(a.alibi.data)[w.b * a.alibi.stride_b + w.h * a.alibi.stride_h];
    for_each_score<C>(row, key, s,
                      [=](float& x, int i, int j) { x = fmaf(-slope, static_cast<float>(abs(i + w.off - j)), x); });
  }
}

// Calls visit(score, element of plane) for each score. pairs: every element of the tile exists, and two columns may be
// read at once; else those of scores that are -inf already are not read, since they may not exist.
template <class C, class Element, class Visit>
__device__ inline void for_each_element(const Plane& plane, bool pairs, const Work& w, int row, int key,
                                        float (&s)[C::kGroups][C::kTileK / 8][4], Visit visit) {
  struct alignas(2 * sizeof(Element)) Pair {
    Element column[2];
  };
  const Element* head = reinterpret_cast<const Element*>(plane.data) + (w.b * plane.stride_b + w.h * plane.stride_h);
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Element* at = head + ((row + kGroupRows * g + 8 * r) * plane.stride_i + key * plane.stride_j);
      constexpr int kBatch = C::kTileK < 32 ? C::kTileK / 8 : 4;  // blocks whose elements are on their way together
#pragma unroll
      for (int first = 0; first < C::kTileK / 8; first += kBatch) {
        Pair pair[kBatch];
        if (pairs) {
#pragma unroll
          for (int n = 0; n < kBatch; ++n) pair[n] = *reinterpret_cast<const Pair*>(at + 8 * (first + n));
        } else {
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (s[g][first + n][2 * r + c] != -INFINITY) {
                pair[n].column[c] = at[(8 * (first + n) + c) * plane.stride_j];
              }
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[g][first + n][2 * r + c];
            if (x != -INFINITY) visit(x, pair[n].column[c]);
          }
        }
      }
    }
  }
}

// Bias and boolean mask. whole: every row attends every key of the tile.
template <class C>
__device__ inline void add_planes(const Params& p, const Work& w, bool whole, int row, int key,
                                  float (&s)[C::kGroups][C::kTileK / 8][4]) {
  const AttentionProblem& a = p.problem;
  const auto add = [](float& x, auto bias) {
    const float added = static_cast<float>(bias);
    x = added == -INFINITY ? -INFINITY : x + added;
  };
  if (a.bias.data != nullptr) {
    if (Float32<C> || a.bias.dtype == DType::f32) {
      for_each_element<C, float>(a.bias, whole && p.bias_pairs, w, row, key, s, add);
    } else {
      for_each_element<C, typename C::Element>(a.bias, whole && p.bias_pairs, w, row, key, s, add);
    }
  }
  if (a.mask.data != nullptr) {
    for_each_element<C, std::uint8_t>(a.mask, whole && p.mask_pairs, w, row, key, s, [](float& x, std::uint8_t attend) {
      if (attend == 0) x = -INFINITY;
    });
  }
}

// Which pairs of a block dropout keeps: bit 2 r + c for row i + 8 r and key + c, of this lane. Two lanes side by side
// hold one quad of keys for two rows each: one draws the random words of the first row, the other those of the second,
// and they swap halves.
__device__ inline unsigned kept_pairs(const Params& p, const Work& w, int i, int key) {
  const auto head = w.b * p.heads.divisor + w.h;
  const bool odd = threadIdx.x % 2 != 0;
  const auto words = dropout_words(p.problem.dropout, head, static_cast<std::uint32_t>(odd ? i + 8 : i),
                                   static_cast<std::uint32_t>(key) / 4);
  const bool keep[4] = {words[0] >= p.drop_below, words[1] >= p.drop_below, words[2] >= p.drop_below,
                        words[3] >= p.drop_below};
  const unsigned given = odd ? keep[0] | keep[1] << 1 : keep[2] | keep[3] << 1;
  const unsigned taken = __shfl_xor_sync(0xffffffff, given, 1);
  const unsigned kept = odd ? keep[2] | keep[3] << 1 : keep[0] | keep[1] << 1;
  return odd ? taken | kept << 2 : kept | taken << 2;
}

// Zeroes dropped probabilities of the 16 keys of a step.
template <class C>
__device__ inline void drop(const Params& p, const Work& w, int row, int key, int step,
                            float (&s)[C::kGroups][C::kTileK / 8][4]) {
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n) {
      const unsigned kept = kept_pairs(p, w, row + kGroupRows * g, key + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((kept >> i & 1) == 0) s[g][n][i] = 0.0f;
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention

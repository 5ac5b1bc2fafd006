// Which pairs of a tile of S^T take part.
//
// Thread t of a warpgroup has in s[4 j + 2 r + c]: key 16 (t / 32) + (t % 32) / 4 + 8 r of the warpgroup's, query
// 8 j + 2 (t % 4) + c of the tile.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/sm90/attention_bwd/config.h"

namespace heddle::cuda::sm90::attention_bwd {

// The first query of a thread, and the first of its two keys, in the tile.
__device__ inline int first_query() { return 2 * static_cast<int>(threadIdx.x % 4); }
__device__ inline int first_key_of_warpgroup() {
  return static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
}

// Whether all of kRows rows from `row` on attend all of a warpgroup's keys from `key` on.
template <int kRows>
__device__ inline bool attends_all(const Params& p, const Work& w, int row, int key) {
  return key + kKeys <= w.first_key + w.keys && key >= row + kRows - 1 + w.off - p.left &&
         key + kKeys - 1 <= row + w.off + p.right;
}

template <int kCount>
__device__ __forceinline__ void mask_band(const Params& p, const Work& w, int row, int key, float (&s)[kCount]) {
  const int column = first_query();
  key += first_key_of_warpgroup();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = key + 8 * r, begin = j - w.off - p.right - row, end = j - w.off + p.left - row + 1;
    const unsigned length =
        j < w.first_key + w.keys ? static_cast<unsigned>(end) - static_cast<unsigned>(begin) : 0;  // to 2^31
    keep_keys<kCount / 4>(begin, length, column, [&](int n) { return &s[4 * n + 2 * r]; });
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

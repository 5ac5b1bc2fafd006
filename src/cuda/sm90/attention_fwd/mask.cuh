// Masking selects: whatever a masked score was, NaN included, it becomes -inf.
#pragma once

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

// Causality, a window, and the end of the keys: row i attends one run of keys. s as a consumer's accumulators;
// first: the position of the warpgroup's row 0; lane_row: of the two rows of this thread, 8 apart, the first.
template <class C>
__device__ inline void mask_band(const Params& p, int first, int lane_row, int k_tile, float (&s)[C::kTileK / 2]) {
  const int column = k_tile * C::kTileK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + p.off + ((lane_row + 8 * r) * p.pack_inverse >> 16);
    const int begin = max(i - p.left, 0);
    const auto length = static_cast<unsigned>(max(min(i + p.right + 1, p.Sk) - begin, 0));
#pragma unroll
    for (int j = 0; j < C::kTileK / 8; ++j) {
      const auto from = static_cast<unsigned>(column - begin + 8 * j);
      if (from >= length) s[4 * j + 2 * r] = -INFINITY;
      if (from + 1 >= length) s[4 * j + 2 * r + 1] = -INFINITY;
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

// The best blocks of a list, over the lanes of a warp.
#pragma once

#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse {

// A block that may be listed: of two keys the larger is better. Above are the bits of a score, which is not negative,
// and one more; below the block's complement, as of equal scores the lower number is better. 0: no block.
using Key = unsigned long long;
__device__ __forceinline__ Key key_of(unsigned score, int block) {
  return Key{score} << 32 | ~static_cast<unsigned>(block);
}
__device__ __forceinline__ unsigned score_of(Key key) { return static_cast<unsigned>(key >> 32); }
__device__ __forceinline__ int block_of(Key key) { return static_cast<int>(~static_cast<unsigned>(key)); }

// One step of a bitonic sort over the lanes, of keys or of scores alone: of two lanes `stride` apart the first keeps
// the better where `falling`.
template <class K>
__device__ __forceinline__ K exchange(K mine, unsigned lane, unsigned stride, bool falling) {
  const K other = __shfl_xor_sync(kAll, mine, stride);
  return ((lane & stride) == 0) == falling ? max(mine, other) : min(mine, other);
}
// In falling order over the lanes, of a run that rises and falls.
template <class K>
__device__ __forceinline__ K merged(K mine, unsigned lane) {
#pragma unroll
  for (unsigned stride = kWarp / 2; stride > 0; stride /= 2) mine = exchange(mine, lane, stride, true);
  return mine;
}
template <class K>
__device__ __forceinline__ K sorted(K mine, unsigned lane) {
#pragma unroll
  for (unsigned size = 2; size < kWarp; size *= 2) {
#pragma unroll
    for (unsigned stride = size / 2; stride > 0; stride /= 2) mine = exchange(mine, lane, stride, (lane & size) == 0);
  }
  return merged(mine, lane);
}

}  // namespace heddle::cuda::sparse

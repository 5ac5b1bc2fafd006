// Sums of the warpgroups that have the same rows and take turns along K.
#pragma once

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/barrier.cuh"

namespace heddle::cuda::linear {

// Adds them up in the first column group; true there. n: number of the part.
template <class C, class Shared>
__device__ __forceinline__ bool gather(Shared& shared, int n, int row, int column, Sums<C>& sums) {
  if constexpr (C::kColumnGroups > 1) {
    constexpr int kThreads = 128 * C::kColumnGroups, kWords = C::kAccumulators / 4;
    const int full = 1 + C::kRowGroups + row, empty = full + C::kRowGroups, thread = this_thread();
    if (column > 0) {
      if (n > 0) ptx::barrier_sync(empty, kThreads);
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const float* const x = sums[block] + 4 * i;
          shared.exchange.sums[row][column - 1][block * kWords + i][thread] = make_float4(x[0], x[1], x[2], x[3]);
        }
      }
      ptx::barrier_arrive(full, kThreads);
      return false;
    }
    ptx::barrier_sync(full, kThreads);
#pragma unroll
    for (int other = 0; other < C::kColumnGroups - 1; ++other) {
#pragma unroll
      for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const float4 x = shared.exchange.sums[row][other][block * kWords + i][thread];
          float* const to = sums[block] + 4 * i;
          to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
        }
      }
    }
    ptx::barrier_arrive(empty, kThreads);
  }
  return true;
}

}  // namespace heddle::cuda::linear

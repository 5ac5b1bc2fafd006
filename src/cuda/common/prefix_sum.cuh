// Sums over the lanes of a warp, each with those before it.
#pragma once

namespace heddle::cuda {

// x of this lane and of the lanes before it. The whole warp.
template <class Int>
__device__ inline Int sum_through_lane(Int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Int other = __shfl_up_sync(0xffffffff, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

}  // namespace heddle::cuda

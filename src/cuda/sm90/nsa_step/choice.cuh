// The best blocks: 32 of a warp's, then of the CTA's, then of the cluster's. Lists are in falling order and end in
// zeros.
#pragma once

#include "cuda/sm90/nsa_step/memory.cuh"

namespace heddle::cuda::sm90::nsa_step {

using sparse::block_of;
using sparse::merged;
using sparse::sorted;

__device__ __forceinline__ Key key_of(float score, int block) {
  return sparse::key_of(__float_as_uint(score) + 1, block);
}

// How many of a list are better than `key`.
__device__ __forceinline__ int better_than(const Key (&list)[kWarp], Key key) {
  int count = 0;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (list[count + step - 1] > key) count += step;
  }
  return count + (list[count] > key ? 1 : 0);  // 31 at most so far
}

// The place of the key at `lane` of list `of` among those of the first `count` lists, whose keys are all different.
__device__ __forceinline__ int place_among(const Key (&lists)[kWarps][kWarp], int count, int of, int lane, Key key) {
  int place = lane;
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    if (n < count && n != of) place += better_than(lists[n], key);
  }
  return place;
}

// The forced blocks of the row at position t, each once, ascending.
struct Forced {
  int block[3] = {-1, -1, -1}, count = 0;

  __device__ Forced(const NsaStepProblem& problem, int t, int block_log2) {
    const int current = t >> block_log2;
    if (problem.forced.first) add(0);
    if (problem.forced.previous) add(current - 1);
    if (problem.forced.current) add(current);
  }
  __device__ bool holds(int other) const { return other == block[0] || other == block[1] || other == block[2]; }

 private:
  // Blocks come in rising order, and so without memory that is addressed.
  __device__ void add(int other) {
    if (other < 0 || holds(other)) return;
    (count == 0 ? block[0] : count == 1 ? block[1] : block[2]) = other;
    ++count;
  }
};

}  // namespace heddle::cuda::sm90::nsa_step

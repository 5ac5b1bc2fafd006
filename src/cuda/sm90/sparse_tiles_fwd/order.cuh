// A CTA sorts a section of tiles by the lengths of their lists, by counting. Those of nearly the same length come in
// any order: which does not change a result.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/sm90/attention/schedule.cuh"

namespace heddle::cuda::sm90::sparse_tiles_fwd {

constexpr int kOrderThreads = 1024, kBuckets = kOrderThreads;

static __global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const __grid_constant__ attention::Params p, int* order) {
  __shared__ int tiles[kBuckets], sums[kOrderThreads / 32], longest;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int size = p.section * p.q_tiles, begin = static_cast<int>(blockIdx.x) * size, end = min(begin + size, p.tiles);
  const auto length = [&](int tile) {
    const attention::TileIndex at = attention::tile_of_batch(p, tile);
    return p.lists.counts[p.lists.number(at.sequence, 0, at.h, at.q_tile)];
  };
  tiles[thread] = 0;
  if (thread == 0) longest = 0;
  __syncthreads();
  int mine = 0;
  for (int tile = begin + thread; tile < end; tile += kOrderThreads) mine = max(mine, length(tile));
  atomicMax(&longest, mine);
  __syncthreads();
  const auto bucket = [&](int tile) {  // the longest have 0
    return static_cast<int>(std::int64_t{longest - length(tile)} * (kBuckets - 1) / max(longest, 1));
  };
  for (int tile = begin + thread; tile < end; tile += kOrderThreads) atomicAdd(&tiles[bucket(tile)], 1);
  __syncthreads();
  const int count = tiles[thread], through = sum_through_lane(count, lane);
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  if (warp == 0) sums[lane] = sum_through_lane(sums[lane], lane);
  __syncthreads();
  tiles[thread] = through - count + (warp > 0 ? sums[warp - 1] : 0);  // where the bucket begins, and fills
  __syncthreads();
  for (int tile = begin + thread; tile < end; tile += kOrderThreads) {
    order[begin + atomicAdd(&tiles[bucket(tile)], 1)] = tile;
  }
}

}  // namespace heddle::cuda::sm90::sparse_tiles_fwd

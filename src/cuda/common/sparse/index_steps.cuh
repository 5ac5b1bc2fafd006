// Steps of the index that lists of one length and those by offsets share.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse {

// Of a block: how many pairs of the tiles before a tile name it, and of all.
__device__ __forceinline__ void sum_tiles(const Index& p, std::int64_t number, int tiles) {
  constexpr int kBatch = 16;  // loads on their way together
  const std::int64_t numbers = p.numbers();
  int before = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile += kBatch) {
    int* const counts = p.tile_counts + tile * numbers + number;
    int of[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) of[n] = tile + n < tiles ? counts[n * numbers] : 0;
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      if (tile + n < tiles) counts[n * numbers] = before;
      before += of[n];
    }
  }
  p.counts[number] = before;
}

// One CTA: where the pairs and the items of each block begin. sums: a warp's each.
template <int kThreads>
__device__ __forceinline__ void scan(const Index& p, int (&sums)[2][kWarp]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int before[2] = {0, 0};
  for (std::int64_t base = 0; base < p.numbers(); base += kThreads) {
    const std::int64_t number = base + thread;
    const bool exists = number < p.numbers();
    const int count = exists ? p.counts[number] : 0;
    const int value[2] = {count, (count + p.pairs_of_item - 1) / p.pairs_of_item};
    int through[2];
    for (int n = 0; n < 2; ++n) {
      through[n] = sum_through_lane(value[n], lane);
      if (lane == kWarp - 1) sums[n][warp] = through[n];
    }
    __syncthreads();
    if (warp < 2) {
      const int all = sum_through_lane(lane < kThreads / kWarp ? sums[warp][lane] : 0, lane);
      sums[warp][lane] = all;
    }
    __syncthreads();
    for (int n = 0; n < 2; ++n) {
      const int begin = before[n] + through[n] - value[n] + (warp > 0 ? sums[n][warp - 1] : 0);
      if (exists) (n == 0 ? p.begins : p.item_begins)[number] = begin;
      before[n] += sums[n][kThreads / kWarp - 1];
    }
    __syncthreads();  // the sums have been read
  }
  if (thread == 0) *p.items_there = before[1];
}

// A pair that says something, to its place. list: of the launch, whose first is number first_list of all.
__device__ __forceinline__ void order_pair(const Index& p, std::int64_t pair, int place, int list, int unit,
                                           std::int64_t first_list) {
  const int number = p.block_of[pair], kv_head = unit / p.kv_units;
  place += p.tile_counts[list / p.lists_of_tile * p.numbers() + number];
  const int first = p.begins[number] + place;
  const Index::Place w = p.place(first_list + list);
  p.named[first] = {static_cast<int>(pair), static_cast<int>(w.row), unit * p.group};
  if (place % p.pairs_of_item == 0) {
    const int nth = place / p.pairs_of_item;
    p.items[p.item_begins[number] + nth] = {static_cast<int>(w.b),
                                            kv_head,
                                            static_cast<int>(number - kv_head * p.blocks - p.first_block(w.b, w.s)),
                                            first,
                                            min(p.pairs_of_item, p.counts[number] - place),
                                            nth};
  }
}

}  // namespace heddle::cuda::sparse

// Which pairs name a block: counted, numbered and put in order, in time and memory of the lists' size. No atomic
// additions: the order of a block's pairs is that of the lists, every time.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse {

constexpr int kIndexThreads = 256, kScanThreads = 1024;

// A warp has a tile of lists of a kv head, one after the other, and so its row of tile_counts to itself. A pair says
// something if its entry names a block of the sequence that a row of the list meets, and no slot before it names the
// same.
static __global__ void __launch_bounds__(kIndexThreads) count_kernel(const __grid_constant__ Index p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x) / kWarp;
  const SparseProblem& problem = p.problem;
  const std::int64_t tile = warp / problem.Hkv, kv_head = warp - tile * problem.Hkv;
  if (tile >= p.tiles()) return;
  const std::int64_t first_list = tile * p.lists_of_tile;
  int* const counts = p.tile_counts + tile * p.numbers();
#pragma unroll 1
  for (std::int64_t n = first_list; n < first_list + p.lists_of_tile && n < p.count; ++n) {
    const Index::Place w = p.place(p.first + n);
    const Interval<std::int64_t> met = p.met(w);
    const std::int64_t first_block = kv_head * p.blocks + p.first_block(w.b, w.s);
#pragma unroll 1
    for (std::int64_t unit = kv_head * p.kv_units; unit < (kv_head + 1) * p.kv_units; ++unit) {
      const std::int64_t at = n * p.units + unit;
      const std::int32_t* entries = nullptr;
      int length = 0;
      if (w.there) {
        const auto named = problem.lists.list(problem, w.b, w.s, w.row, unit);
        entries = named.data();
        length = static_cast<int>(named.size());
      }
#pragma unroll 1
      for (int base = 0; base < p.slots; base += kWarp) {
        const int slot = base + lane;
        const std::int64_t block = slot < length ? entries[slot] : -1;
        bool says = p.meets(met, block);
        // Of lanes with the same block the first stays; one that says nothing has a number of its own.
        const unsigned same = __match_any_sync(kAll, says ? static_cast<int>(block) : -1 - lane);
        says = says && (same & ((1u << lane) - 1)) == 0;
        for (int before = 0; before < base; ++before) says = says && entries[before] != block;
        int place = -1;
        if (says) {
          const std::int64_t number = first_block + block;
          p.block_of[at * p.slots + slot] = static_cast<int>(number);
          place = counts[number]++;
        }
        if (slot < p.slots) p.place_of[at * p.slots + slot] = place;
        __syncwarp();  // another lane may name the block next
      }
    }
  }
}

// Of each block: how many pairs of the tiles before a tile name it, and of all.
static __global__ void __launch_bounds__(kIndexThreads) sum_tiles_kernel(const __grid_constant__ Index p) {
  constexpr int kBatch = 16;  // loads on their way together
  const std::int64_t number = std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x, numbers = p.numbers();
  if (number >= numbers) return;
  const int tiles = static_cast<int>(p.tiles());
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

// One CTA: where the pairs and the items of each block begin.
static __global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Index p) {
  __shared__ int sums[2][kScanThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int before[2] = {0, 0};
  for (std::int64_t base = 0; base < p.numbers(); base += kScanThreads) {
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
      const int all = sum_through_lane(sums[warp][lane], lane);
      sums[warp][lane] = all;
    }
    __syncthreads();
    for (int n = 0; n < 2; ++n) {
      const int begin = before[n] + through[n] - value[n] + (warp > 0 ? sums[n][warp - 1] : 0);
      if (exists) (n == 0 ? p.begins : p.item_begins)[number] = begin;
      before[n] += sums[n][kScanThreads / kWarp - 1];
    }
    __syncthreads();  // the sums have been read
  }
  if (thread == 0) *p.items_there = before[1];
}

static __global__ void __launch_bounds__(kIndexThreads) order_kernel(const __grid_constant__ Index p) {
  const std::int64_t pair = std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (pair >= p.count * p.units * p.slots) return;
  int place = p.place_of[pair];
  if (place < 0) return;
  const int at = static_cast<int>(pair / p.slots), list = at / p.units, unit = at - list * p.units;
  const int number = p.block_of[pair], kv_head = unit / p.kv_units;
  place += p.tile_counts[list / p.lists_of_tile * p.numbers() + number];
  const int first = p.begins[number] + place;
  const Index::Place w = p.place(p.first + list);
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

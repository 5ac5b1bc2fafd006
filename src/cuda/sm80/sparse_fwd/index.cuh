// Which pairs name a block: counted, numbered and put in order, in time and memory of the lists' size.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/sm80/sparse_fwd/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

constexpr unsigned kAll = 0xffffffff;
constexpr int kIndexThreads = 256, kScanThreads = 1024;

// A warp has a list of a head unit. A pair says something if its entry names a block of the sequence that a row of the
// list meets, and no slot before it names the same.
static __global__ void __launch_bounds__(kIndexThreads) count_kernel(const __grid_constant__ Params p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t at = (std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x) / kWarp;
  if (at >= p.count * p.units) return;
  const std::int64_t list = p.first + at / p.units, unit = at % p.units;
  const Params::Place w = p.place(list);
  const SparseProblem& problem = p.problem;
  const std::int64_t size = problem.lists.block_size;
  const std::int32_t* entries = nullptr;
  int length = 0;
  Interval<std::int64_t> met;
  if (w.there) {
    const auto named = problem.lists.list(problem, w.b, w.s, w.row, unit);
    entries = named.data();
    length = static_cast<int>(named.size());
    met = p.band(w.s).keys_of({w.row, w.row + problem.lists.query_rows});
  }
  const std::int64_t first_block = unit * p.blocks + p.first_block(w.b, w.s);
  for (int base = 0; base < p.slots; base += kWarp) {
    const int slot = base + lane;
    const std::int64_t block = slot < length ? entries[slot] : -1;
    bool says = block >= 0 && block * size < met.end && (block + 1) * size > met.begin;
    // Of lanes with the same block the first stays; one that says nothing has a number of its own.
    const unsigned same = __match_any_sync(kAll, says ? static_cast<int>(block) : -1 - lane);
    says = says && (same & ((1u << lane) - 1)) == 0;
    for (int before = 0; before < base; ++before) says = says && entries[before] != block;
    if (slot >= p.slots) continue;
    const std::int64_t pair = at * p.slots + slot;
    int place = -1;
    if (says) {
      const std::int64_t number = first_block + block;
      p.block_of[pair] = static_cast<int>(number);
      place = atomicAdd(p.counts + number, 1);
    }
    p.place_of[pair] = place;
  }
}

// One CTA: where the pairs and the items of each block begin.
static __global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Params p) {
  __shared__ int sums[2][kScanThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int before[2] = {0, 0};
  for (std::int64_t base = 0; base < p.units * p.blocks; base += kScanThreads) {
    const std::int64_t number = base + thread;
    const bool exists = number < p.units * p.blocks;
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

// The order of a block's pairs is that in which they were counted, which no result depends on.
static __global__ void __launch_bounds__(kIndexThreads) order_kernel(const __grid_constant__ Params p) {
  const std::int64_t pair = std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (pair >= p.count * p.units * p.slots) return;
  const int place = p.place_of[pair];
  if (place < 0) return;
  const int block = p.block_of[pair], first = p.begins[block] + place;
  const std::int64_t at = pair / p.slots;
  const Params::Place w = p.place(p.first + at / p.units);
  p.named[first] = {static_cast<int>(pair), static_cast<int>(w.row)};
  if (place % p.pairs_of_item == 0) {
    const std::int64_t unit = at % p.units;
    p.items[p.item_begins[block] + place / p.pairs_of_item] = {
        static_cast<int>(w.b), static_cast<int>(unit),
        static_cast<int>(block - unit * p.blocks - p.first_block(w.b, w.s)), first,
        min(p.pairs_of_item, p.counts[block] - place)};
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

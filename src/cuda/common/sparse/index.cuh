// Which pairs name a block: counted, numbered and put in order, in time and memory of the lists' size. No atomic
// additions: the order of a block's pairs is that of the lists, every time.
#pragma once

#include "cuda/common/sparse/index_steps.cuh"

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

static __global__ void __launch_bounds__(kIndexThreads) sum_tiles_kernel(const __grid_constant__ Index p) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (number < p.numbers()) sum_tiles(p, number, static_cast<int>(p.tiles()));
}

static __global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Index p) {
  __shared__ int sums[2][kScanThreads / kWarp];
  scan<kScanThreads>(p, sums);
}

static __global__ void __launch_bounds__(kIndexThreads) order_kernel(const __grid_constant__ Index p) {
  const std::int64_t pair = std::int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (pair >= p.count * p.units * p.slots) return;
  const int place = p.place_of[pair];
  if (place < 0) return;
  const int at = static_cast<int>(pair / p.slots), list = at / p.units, unit = at - list * p.units;
  order_pair(p, pair, place, list, unit, p.first);
}

}  // namespace heddle::cuda::sparse

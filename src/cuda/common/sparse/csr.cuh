// The index of lists one behind the other, round by round, in one cooperative grid: as index.cuh has it of lists of one
// length, but that the pairs of a list that say something lie side by side, and the device knows when it is through.
#pragma once

#include <cooperative_groups.h>

#include "cuda/common/recomputed.cuh"
#include "cuda/common/sparse/csr.h"
#include "cuda/common/sparse/index_steps.cuh"

namespace heddle::cuda::sparse {

// As many lists from `first` on as there is room for.
__device__ inline Round round_from(const Index& p, const Csr& c, std::int64_t first) {
  const std::int64_t before = c.room_before(first * p.units);
  const auto room_to = [&](std::int64_t list) { return c.room_before(list * p.units) - before; };
  std::int64_t end = first, most = min(c.lists, first + c.lists_at_once);
  while (end < most) {
    const std::int64_t middle = end + (most - end + 1) / 2;
    if (room_to(middle) <= c.pairs_at_once) {
      end = middle;
    } else {
      most = middle - 1;
    }
  }
  return {first, static_cast<int>(end - first), static_cast<int>(room_to(end))};
}

// As count_kernel(), in time of a list's length: what it has named already has its mark.
template <int kThreads>
__device__ inline void count_pairs(const Index& p, const Csr& c, const Round& round) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const SparseProblem& problem = p.problem;
  const std::int64_t before = c.room_before(round.first * p.units);
  const std::int64_t tiles = (round.count + p.lists_of_tile - 1) / p.lists_of_tile;
  constexpr int kWarps = kThreads / kWarp;
#pragma unroll 1
  for (std::int64_t work = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; work < tiles * problem.Hkv;
       work += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t tile = work / problem.Hkv, kv_head = work - tile * problem.Hkv;
    int *const counts = p.tile_counts + tile * p.numbers(), *const marks = c.marks + tile * p.numbers();
    const std::int64_t end = min((tile + 1) * p.lists_of_tile, std::int64_t{round.count});
#pragma unroll 1
    for (std::int64_t n = tile * p.lists_of_tile; n < end; ++n) {
      const Index::Place w = p.place(round.first + n);
      const Interval<std::int64_t> met = p.met(w);
      const std::int64_t first_block = kv_head * p.blocks + p.first_block(w.b, w.s);
#pragma unroll 1
      for (std::int64_t unit = kv_head * p.kv_units; unit < (kv_head + 1) * p.kv_units; ++unit) {
        const std::int64_t number = (round.first + n) * p.units + unit;
        const std::int64_t first = c.room_before(number) - before;
        const int at = static_cast<int>(n * p.units + unit), mark = static_cast<int>(number),
                  room = static_cast<int>(c.room_before(number + 1) - before - first);
        const std::int32_t* entries = nullptr;
        std::int64_t length = 0;
        if (w.there) {
          const auto named = problem.lists.list(problem, w.b, w.s, w.row, unit);
          entries = named.data();
          length = static_cast<std::int64_t>(named.size());
        }
        int used = 0;
#pragma unroll 1
        for (std::int64_t slot = lane; slot - lane < length; slot += kWarp) {
          const std::int64_t block = slot < length ? entries[slot] : -1;
          bool says = p.meets(met, block);
          // Of lanes with the same block the first stays; one that says nothing has a number of its own.
          const unsigned same = __match_any_sync(kAll, says ? static_cast<int>(block) : -1 - lane);
          says = says && (same & ((1u << lane) - 1)) == 0 && marks[first_block + block] != mark;
          const unsigned these = __ballot_sync(kAll, says);
          const int nth = used + __popc(these & ((1u << lane) - 1));
          if (says && nth < room) {  // there is room for all blocks of a sequence
            const std::int64_t block_number = first_block + block, pair = first + nth;
            marks[block_number] = mark;
            p.block_of[pair] = static_cast<int>(block_number);
            c.list_of[pair] = at;
            p.place_of[pair] = counts[block_number]++;
          }
          used += __popc(these);
          __syncwarp();  // another lane may name the block next
        }
        used = min(used, room);
        for (int nth = used + lane; nth < room; nth += kWarp) p.place_of[first + nth] = -1;
        if (lane == 0) c.used[at] = used;
      }
    }
  }
}

// What a CTA goes through, in shared memory: while an item is met no register is free.
struct Steps {
  int parity;  // of the round
  int item;    // the CTA's, of all items' tiles of keys
  int sums[2][kWarp];
};

// threadIdx.x, of which nothing is computed ahead and kept.
__device__ __forceinline__ int this_thread() { return recomputed(static_cast<int>(threadIdx.x)); }

// visit(n) for n from 0 to count - 1, each by kLanes threads side by side.
template <int kThreads, int kLanes = 1, class Visit>
__device__ __forceinline__ void for_threads(std::int64_t count, Visit visit) {
  constexpr int kAtOnce = kThreads / kLanes;
#pragma unroll 1
  for (std::int64_t n = std::int64_t{blockIdx.x} * kAtOnce + this_thread() / kLanes; n < count;
       n += std::int64_t{gridDim.x} * kAtOnce) {
    visit(n);
  }
}

// A function of its own, so that a caller keeps nothing for it.
static __device__ __noinline__ void await_grid() { cooperative_groups::this_grid().sync(); }

// Rounds to the last list, of a grid whose CTAs are all on the chip. meet_item(n): what a CTA does with a tile of an
// item's keys, number n() of all such tiles. join(round): what becomes of a round's partial results, by all threads.
template <int kThreads, class MeetItem, class Join>
__device__ __forceinline__ void for_rounds(const Index& p, const Csr& c, MeetItem meet_item, Join join) {
  __shared__ Steps steps;
  // It was written a grid's wait ago, or by the launch before.
  const auto round = [&]() -> const Round& { return c.rounds[steps.parity]; };
  const auto tiles = [&] { return (round().count + p.lists_of_tile - 1) / p.lists_of_tile; };
  if (threadIdx.x == 0) steps.parity = 0;
  __syncthreads();
#pragma unroll 1
  while (round().count > 0) {
    count_pairs<kThreads>(p, c, round());
    await_grid();
    for_threads<kThreads>(p.numbers(), [&](std::int64_t number) { sum_tiles(p, number, tiles()); });
    await_grid();
    if (blockIdx.x == 0) scan<kThreads>(p, steps.sums);
    await_grid();
    for_threads<kThreads>(round().pairs, [&](std::int64_t pair) {
      if (const int place = p.place_of[pair]; place >= 0) {
        const int at = c.list_of[pair], list = at / p.units;
        order_pair(p, pair, place, list, at - list * p.units, round().first);
      }
    });
    if (threadIdx.x == 0) steps.item = static_cast<int>(blockIdx.x);
    await_grid();
#pragma unroll 1
    while (steps.item < *p.items_there * p.subs) {
      meet_item([&] { return steps.item; });
      __syncthreads();  // all warps are done with shared memory, whose place the next item takes, and know which it was
      if (threadIdx.x == 0) steps.item += static_cast<int>(gridDim.x);
      __syncthreads();
    }
    await_grid();
    // For the next round: nobody reads the counts of this one any longer, or the next round yet.
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      c.rounds[1 - steps.parity] = round_from(p, c, round().first + round().count);
    }
    for_threads<kThreads>(tiles() * p.numbers(), [&](std::int64_t n) { p.tile_counts[n] = 0; });
    join(round());
    await_grid();
    if (threadIdx.x == 0) steps.parity = 1 - steps.parity;
    __syncthreads();
  }
}

}  // namespace heddle::cuda::sparse

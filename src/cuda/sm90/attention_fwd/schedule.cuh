// The thread that decides which tiles this CTA computes, and in which order, and announces them to the others.
#pragma once

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

// Tiles in sections of heads whose keys stay in the L2 cache; in each the last rows first: under a causal mask they
// have most keys, and short tiles at the end let all CTAs finish together.
template <class C>
__device__ void describe_tile(const Params& p, int tile, Work& w) {
  const int size = p.section * p.q_tiles, first = tile / size * p.section, rest = tile % size;
  const int units = min(p.section, p.heads * p.B - first);
  const int unit = first + rest % units;
  constexpr int kWarpgroups = C::kConsumers;
  w.position = (p.q_tiles - 1 - rest / units) * kWarpgroups * p.positions;
  w.h = unit % p.heads;
  w.b = unit / p.heads;
  const int from = w.position + p.off, to = min(w.position + kWarpgroups * p.positions, p.Sq) - 1 + p.off;
  const int begin = max(from - p.left, 0), end = min(to + p.right + 1, p.Sk);
  // A tile without keys meets one key tile beyond the end, which arrives as zeros: that keeps the pipeline simple.
  w.k_begin = begin < end ? begin / C::kTileK : p.Sk / C::kTileK + 1;
  w.k_end = begin < end ? (end + C::kTileK - 1) / C::kTileK : w.k_begin + 1;
  w.whole_begin = (max(to - p.left, 0) + C::kTileK - 1) / C::kTileK;
  w.whole_end = min(from + p.right + 1, p.Sk) / C::kTileK;
}

// One thread. Where tiles differ much in cost, p.next_tile deals them out as CTAs become free; a CTA then claims its
// next tile not before it has written out the last but one, or the end would be uneven.
template <class C>
__device__ void schedule(const Params& p, SharedMemory<C>& shared) {
  const int grid = static_cast<int>(gridDim.x);
  RingPosition<kWorkSlots> slot, last_but_one;
  int tile = static_cast<int>(blockIdx.x);
  for (bool first = true; tile < p.tiles; first = false) {
    describe_tile<C>(p, tile, shared.work[slot.index]);
    ptx::barrier_arrive(shared.work_ready[slot.index]);
    slot.next();
    if (p.next_tile != nullptr) {
      if (!first) {
        ptx::barrier_wait(shared.work_free[last_but_one.index], last_but_one.phase);
        last_but_one.next();
      }
      tile = grid + atomicAdd(p.next_tile, 1);
    } else {
      ptx::barrier_wait(shared.work_free[slot.index], slot.phase ^ 1);
      tile += grid;
    }
  }
  shared.work[slot.index].position = -1;
  ptx::barrier_arrive(shared.work_ready[slot.index]);
}

}  // namespace heddle::cuda::sm90::attention_fwd

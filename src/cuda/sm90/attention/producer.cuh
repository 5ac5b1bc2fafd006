// The thread that brings keys and values to shared memory.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/planted.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/params.h"
#include "cuda/sm90/attention/tile.cuh"
#include "cuda/sm90/attention/work.cuh"

namespace heddle::cuda::sm90::attention {

// A tile of keys or values.
template <class Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, ptx::Barrier& ready, int row, int h, int b) {
  ptx::barrier_arrive_expect(ready, sizeof(tile.panel));
  load_panels(tile, map, ready, row, h, b, ptx::L2::evict_last);
}

// When so many steps of a tile's walk are still to be brought, the scheduler may claim the next tile: early enough that
// nobody waits for it, and so late that claims come in the order in which CTAs become free.
constexpr int kEndingSteps = 8;

// One thread. Keys come from the last step of a walk to the first; k runs one step ahead of v, as the consumers take
// them. v_free: of each stage of v; v_landed(w, tile, stage): the barrier that a tile of v is announced at.
template <class C, class Memory, class Landed>
__device__ __forceinline__ void produce_keys(const Params& p, Memory& shared, ptx::Barrier (&v_free)[C::kStages],
                                             const Landed& v_landed) {
  RingPosition<C::kStages> k, v;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const TileWork<typename C::Walk>& w = shared.work[slot.index];
    if (w.position == kNoMoreTiles) return;  // a pause has no keys
    const int h = w.h / p.kv_divisor, b = p.cu_seqlens_k != nullptr ? 0 : w.sequence;
    const int first = w.walk.steps().begin, end = w.walk.steps().end, ending = min(first + kEndingSteps, end) - 1;
    // step: of k. Not unrolled, as the producers have few registers.
#pragma unroll 1
    for (int step = end - 1; step >= first - 1; --step) {
      if (step == ending) ptx::barrier_arrive(shared.work_ending);
      if (step >= first) {
        await_free(shared.k_free[k.index], k.phase);
        planted_pause(Plant::unawaited_keys, false);
        const int row = w.k_row + w.walk.index(step) * C::kTileK;
        load_keys(shared.k[k.index], p.k, shared.k_ready[k.index], row, h, b);
        k.next();
      }
      if (step + 1 < end) {
        await_free(v_free[v.index], v.phase);
        const int tile = w.walk.index(step + 1);
        load_keys(shared.v[v.index], p.v, v_landed(w, tile, v.index), w.k_row + tile * C::kTileK, h, b);
        v.next();
      }
    }
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

}  // namespace heddle::cuda::sm90::attention

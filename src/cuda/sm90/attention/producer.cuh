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

// When so many tiles of keys are still to be brought, the scheduler may claim the next tile of rows: early enough that
// nobody waits for it, and so late that claims come in the order in which CTAs become free.
constexpr int kEndingTiles = 8;

// One thread. Keys come from the last tile of a row of tiles to the first; k runs one tile ahead of v, as the consumers
// take them. v_free: of each stage of v; v_landed(w, tile, stage): the barrier that a tile of v is announced at.
template <class C, class Memory, class Landed>
__device__ __forceinline__ void produce_keys(const Params& p, Memory& shared, ptx::Barrier (&v_free)[C::kStages],
                                             const Landed& v_landed) {
  RingPosition<C::kStages> k, v;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    if (w.position == kNoMoreTiles) return;  // a pause has no keys
    const int h = w.h / p.kv_divisor, b = p.cu_seqlens_k != nullptr ? 0 : w.sequence, count = w.k_end - w.k_begin;
    const int ending = max(count - kEndingTiles, 0);
    int row = w.k_row + (w.k_end - 1) * C::kTileK;  // of the tile of k
#pragma unroll 1                                    // the producers have few registers
    for (int n = 0; n <= count; ++n, row -= C::kTileK) {
      if (n == ending) ptx::barrier_arrive(shared.work_ending);
      if (n < count) {
        await_free(shared.k_free[k.index], k.phase);
        planted_pause(Plant::unawaited_keys, false);
        load_keys(shared.k[k.index], p.k, shared.k_ready[k.index], row, h, b);
        k.next();
      }
      if (n > 0) {
        await_free(v_free[v.index], v.phase);
        load_keys(shared.v[v.index], p.v, v_landed(w, w.k_end - n, v.index), row + C::kTileK, h, b);
        v.next();
      }
    }
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

}  // namespace heddle::cuda::sm90::attention

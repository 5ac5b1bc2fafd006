// The threads that bring q, k and v to shared memory.
#pragma once

#include "cuda/sm90/attention_fwd/guard.cuh"

namespace heddle::cuda::sm90::attention_fwd {

template <class Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, ptx::Barrier& ready, int row, int h, int b) {
  ptx::barrier_arrive_expect(ready, sizeof(tile.panel));
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::tma_load_4d(tile.panel[panel], map, ready, panel * kPanel, row, h, b, ptx::L2::evict_last);
  }
}

// One thread. Keys come from the last tile of a row of tiles to the first; k runs one tile ahead of v, as the consumers
// take them.
template <class C>
__device__ void produce_keys(const Params& p, SharedMemory<C>& shared) {
  RingPosition<C::kStages> k, v;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    if (w.position == kNoMoreTiles) return;  // a pause has no keys
    const int h = w.h / p.kv_divisor, b = p.cu_seqlens_k != nullptr ? 0 : w.sequence, count = w.k_end - w.k_begin;
    int row = w.k_row + (w.k_end - 1) * C::kTileK;  // of the tile of k
#pragma unroll 1                                    // the producers have few registers
    for (int n = 0; n <= count; ++n, row -= C::kTileK) {
      if (n < count) {
        ptx::barrier_wait(shared.k_free[k.index], k.phase ^ 1);
        load_keys(shared.k[k.index], p.k, shared.k_ready[k.index], row, h, b);
        k.next();
      }
      if (n > 0) {
        ptx::barrier_wait(shared.v_free[v.index], v.phase ^ 1);
        load_keys(shared.v[v.index], p.v,
                  passes_guard<C>(p, w, w.k_end - n) ? shared.v_landed[v.index] : shared.v_ready[v.index],
                  row + C::kTileK, h, b);
        v.next();
      }
    }
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

// One thread, so that q never waits behind keys.
template <class C>
__device__ void produce_q(const Params& p, SharedMemory<C>& shared) {
  std::uint32_t phase = 0;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    const int position = w.position;
    if (position == kNoMoreTiles) return;
    const int h = w.h, b = p.cu_seqlens_q != nullptr ? 0 : w.sequence, row = w.q_row + position;
    ptx::barrier_arrive(shared.work_free[slot.index]);
    if (C::kRemovesPairs && position == kPause) continue;
#pragma unroll 1
    for (int c = 0; c < C::kConsumers; ++c) {
      auto& q = shared.q[c];
      ptx::barrier_wait(shared.q_free[c], phase ^ 1);
      ptx::barrier_arrive_expect(shared.q_ready[c], sizeof(q.panel[0][0]) * p.positions * p.pack * q.kPanels);
#pragma unroll
      for (int panel = 0; panel < q.kPanels; ++panel) {
        ptx::tma_load_5d(q.panel[panel], p.q, shared.q_ready[c], panel * kPanel, 0, row + c * p.positions, h, b,
                         ptx::L2::evict_first);
      }
    }
    phase ^= 1;
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

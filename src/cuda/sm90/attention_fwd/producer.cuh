// The threads that bring q, k and v to shared memory.
#pragma once

#include "cuda/sm90/attention_fwd/config.h"
#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd {

template <class Tile>
__device__ void load_keys(Tile& tile, const CUtensorMap& map, ptx::Barrier& ready, int row, int h, int b) {
  ptx::barrier_arrive_expect(ready, sizeof(tile.panel));
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::tma_load_4d(tile.panel[panel], map, ready, panel * kPanel, row, h, b, ptx::L2::evict_last);
  }
}

// Keys come from the last tile of a row of tiles to the first; k runs one tile ahead of v, as the consumers take them.
template <class C>
__device__ void produce_keys(const Params& p, SharedMemory<C>& shared) {
  RingPosition<C::kStages> k, v;
  const auto load_k = [&](int tile, int h, int b) {
    ptx::barrier_wait(shared.k_free[k.index], k.phase ^ 1);
    load_keys(shared.k[k.index], p.k, shared.k_ready[k.index], tile * C::kTileK, h, b);
    k.next();
  };
  const auto load_v = [&](int tile, int h, int b) {
    ptx::barrier_wait(shared.v_free[v.index], v.phase ^ 1);
    load_keys(shared.v[v.index], p.v, shared.v_ready[v.index], tile * C::kTileK, h, b);
    v.next();
  };
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    if (w.position < 0) return;
    const int h = w.h / p.kv_divisor, b = w.b, k_begin = w.k_begin;
    int tile = w.k_end - 1;
    ptx::barrier_arrive(shared.work_free[slot.index]);
    load_k(tile, h, b);
    for (; tile > k_begin; --tile) {
      load_k(tile - 1, h, b);
      load_v(tile, h, b);
    }
    load_v(tile, h, b);
  }
}

// A thread of its own, so that q never waits behind keys.
template <class C>
__device__ void produce_q(const Params& p, SharedMemory<C>& shared) {
  std::uint32_t phase = 0;
  for (RingPosition<kWorkSlots> slot;; slot.next(), phase ^= 1) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const Work& w = shared.work[slot.index];
    if (w.position < 0) return;
#pragma unroll 1  // the producers have 24 registers
    for (int c = 0; c < C::kConsumers; ++c) {
      auto& q = shared.q[c];
      ptx::barrier_wait(shared.q_free[c], phase ^ 1);
      ptx::barrier_arrive_expect(shared.q_ready[c], sizeof(q.panel[0][0]) * p.positions * p.pack * q.kPanels);
#pragma unroll
      for (int panel = 0; panel < q.kPanels; ++panel) {
        ptx::tma_load_5d(q.panel[panel], p.q, shared.q_ready[c], panel * kPanel, 0, w.position + c * p.positions, w.h,
                         w.b, ptx::L2::evict_first);
      }
    }
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

// The warp that brings k and v once, and q, dO and their statistics tile by tile.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/tile.cuh"
#include "cuda/sm90/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// Rows of q and dO that attend no key become zeros: P and dS are zero for them, but zero times NaN is not. The whole
// warp.
template <class C>
__device__ void clear_idle_rows(SharedMemory<C>& shared, int q, int d_o) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int from = 0; from < C::kTileQ; from += 32) {
    unsigned idle = __ballot_sync(0xffffffff, shared.lse[q][from + lane] == INFINITY);
#pragma unroll 1
    for (; idle != 0; idle &= idle - 1) {
      const int row = from + __ffs(static_cast<int>(idle)) - 1;
      clear_rows(shared.q[q], row, row + 1, lane, 32);
      clear_rows(shared.d_o[d_o], row, row + 1, lane, 32);
    }
  }
}

// Whether a listed tile of rows may have some that meet none of the keys that this step is about, without being idle: a
// row may have other keys, far away.
template <class C>
__device__ bool may_miss_keys(const TileWork<typename C::Walk>& w, int step) {
  if constexpr (C::kListed) return !w.walk.whole_tile(w.walk.index(step));
  return false;
}

// Makes such rows idle ones, for this tile. The whole warp.
template <class C>
__device__ void idle_rows_that_miss_keys(const Params& p, SharedMemory<C>& shared, int q, int step) {
  if constexpr (C::kListed) {
    const auto& w = shared.work;
    const Interval<int> keys = keys_of_step<C>(w.walk, step);
    const int first = w.walk.index(step) * C::kTileQ + w.off - w.first_key;  // row 0 less the first key
    const int begin = keys.begin - p.right - first, end = min(keys.end, w.keys) + p.left - first;
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) % 32; row < C::kTileQ; row += 32) {
      if (row < begin || row >= end) shared.lse[q][row] = INFINITY;
    }
    __syncwarp();
  }
}

// One warp.
template <class C>
__device__ void produce(const Params& p, SharedMemory<C>& shared) {
  const auto& w = shared.work;
  const bool first_lane = threadIdx.x % 32 == 0;
  if (first_lane) {
    ptx::barrier_arrive_expect(shared.k_ready, sizeof(shared.k.panel));
    load_panels(shared.k, p.k, shared.k_ready, w.k_row + w.first_key, w.kv_head, w.k_batch, ptx::L2::evict_first);
    ptx::barrier_arrive_expect(shared.v_ready, sizeof(shared.v.panel));
    load_panels(shared.v, p.v, shared.v_ready, w.k_row + w.first_key, w.kv_head, w.k_batch, ptx::L2::evict_first);
  }
  wait_for_previous_grid();  // of the rows' statistics
  constexpr std::uint32_t kRowBytes = C::kTileQ * sizeof(float);
  RingPosition<C::kStages> q;
  RingPosition<C::kOutputStages> d_o;
  std::uint32_t landed = 0;  // phases, a bit for each stage
#pragma unroll 1
  for (QueryTiles tiles(w); tiles.left > 0; tiles.next(), q.next(), d_o.next()) {
    const int h = tiles.head, row = tiles.tile() * C::kTileQ;
    const std::int64_t statistics = h * p.rows_per_head + w.statistics_row;
    // A bias or mask may leave any row without keys.
    const bool clears = C::kOption == Option::kPlanes || row < w.first_row ||
                        (row + C::kTileQ > w.last_row && w.clears_end) || may_miss_keys<C>(w, tiles.step);
    await_free(shared.q_free[q.index], q.phase);
    if (first_lane) {
      if constexpr (C::kHasParts) {  // its arrival tells of these too
        const int parts = w.walk.parts(tiles.step);
        for (int n = 0; n < kConsumers; ++n) shared.named[q.index][n] = (parts >> n & 1) != 0;
      }
      auto& ready = clears ? shared.landed[q.index] : shared.q_ready[q.index];
      ptx::barrier_arrive_expect(ready, sizeof(shared.q[0].panel) + kRowBytes);
      load_panels(shared.q[q.index], p.q, ready, w.q_row + row, h, w.q_batch, ptx::L2::evict_last);
      ptx::bulk_load(shared.lse[q.index], p.lse_log2 + statistics + row, kRowBytes, ready);
    }
    await_free(shared.d_o_free[d_o.index], d_o.phase);
    if (first_lane) {
      auto& ready = clears ? shared.landed[q.index] : shared.d_o_ready[d_o.index];
      ptx::barrier_arrive_expect(ready, sizeof(shared.d_o[0].panel) + kRowBytes);
      load_panels(shared.d_o[d_o.index], p.d_o, ready, w.q_row + row, h, w.q_batch, ptx::L2::evict_last);
      ptx::bulk_load(shared.delta[d_o.index], p.delta + statistics + row, kRowBytes, ready);
    }
    if (!clears) continue;
    __syncwarp();
    ptx::barrier_wait(shared.landed[q.index], landed >> q.index & 1);
    landed ^= 1u << q.index;
    idle_rows_that_miss_keys(p, shared, q.index, tiles.step);
    clear_idle_rows(shared, q.index, d_o.index);
    ptx::fence_async_shared();
    __syncwarp();
    if (first_lane) {
      ptx::barrier_arrive(shared.q_ready[q.index]);
      ptx::barrier_arrive(shared.d_o_ready[d_o.index]);
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

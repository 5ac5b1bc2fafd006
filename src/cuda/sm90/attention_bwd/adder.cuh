// Deterministic sums of dQ: a thread for each consumer warpgroup adds what that hands over, each tile when its turn has
// come, and passes the turn on when the sum is there. Turns are known to be there only after microseconds; no consumer
// waits for them.
#pragma once

#include "cuda/sm90/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// Blocks of 64 rows and 64 dims that a tile's dQ has; those of one warpgroup are every other one.
template <class C>
constexpr int kQueryBlocks = C::kTileQ * C::kHeadSize / (64 * 64);

__device__ inline void pass_turn(int* turn) {
  ptx::bulk_wait();
  ptx::fence_async();
  ptx::add_release(turn, 1);
}

// One thread.
template <class C>
__device__ void add_in_turns(const Params& p, SharedMemory<C>& shared, int warpgroup) {
  const Work& w = shared.work;
  std::uint32_t phase = 0;
  int* before = nullptr;  // the turn to be passed on
#pragma unroll 1
  for (QueryTiles tiles(p, w); tiles.left > 0; tiles.next()) {
    const std::int64_t row = tiles.head * p.rows_per_head + w.statistics_row + tiles.tile * C::kTileQ;
    int* const turn = p.turns + (row / C::kTileQ * kConsumers + warpgroup);
    const int place = place_in_order<C>(p, w, tiles.tile);
    int come = ptx::load_acquire(turn);
    if (before != nullptr) pass_turn(before);
    while (come != place) come = ptx::load_acquire(turn);
    ptx::fence_async();
#pragma unroll 1
    for (int block = warpgroup; block < kQueryBlocks<C>; block += kConsumers, phase ^= 1) {
      ptx::barrier_wait(shared.staged[warpgroup], phase);
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        ptx::bulk_add(p.dq + row * C::kHeadSize + block * (64 * 64) + warp * (16 * 64),
                      shared.staging[4 * warpgroup + warp].dq, sizeof(shared.staging[0].dq));
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read();
      ptx::barrier_arrive(shared.staging_free[warpgroup]);
    }
    before = turn;
  }
  if (before != nullptr) pass_turn(before);
}

}  // namespace heddle::cuda::sm90::attention_bwd

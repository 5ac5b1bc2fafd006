// The warp that adds one consumer warpgroup's blocks of dQ to their sums in memory, by the copying engine: added from the
// registers, they would hold up what the consumers want of shared memory.
#pragma once

#include "cuda/sm90/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// Blocks of 64 rows and 64 dims that a tile's dQ has; those of one warpgroup are every other one.
template <class C>
constexpr int kQueryBlocks = C::kTileQ * C::kHeadSize / (64 * 64);

// One thread. Where sums are to be deterministic, it waits for its turn with each tile and passes it on when the sum is
// there.
template <class C>
__device__ void add_query_gradients(const Params& p, SharedMemory<C>& shared, int warpgroup) {
  const Work& w = shared.work;
  std::uint32_t phase = 0;
#pragma unroll 1
  for (QueryTiles tiles(p, w); tiles.left > 0; tiles.next()) {
    const std::int64_t row = tiles.head * p.rows_per_head + w.statistics_row + tiles.tile * C::kTileQ;
    int* const turn = p.turns + (row / C::kTileQ * kConsumers + warpgroup);
    if (p.turns != nullptr) {
      const int place = place_in_order<C>(p, w, tiles.tile);
      while (ptx::load_acquire(turn) != place) {
      }
      ptx::fence_async();
    }
#pragma unroll 1
    for (int block = warpgroup; block < kQueryBlocks<C>; block += kConsumers, phase ^= 1) {
      ptx::barrier_wait(shared.staged[warpgroup], phase);
      ptx::bulk_add(p.dq + row * C::kHeadSize + block * (64 * 64), shared.staging[4 * warpgroup].dq,
                    64 * 64 * sizeof(float));
      ptx::bulk_commit();
      ptx::bulk_wait_read();
      ptx::barrier_arrive(shared.staging_free[warpgroup]);
    }
    if (p.turns != nullptr) {
      ptx::bulk_wait();
      ptx::fence_async();
      ptx::add_release(turn, 1);
    }
  }
  ptx::bulk_wait();
}

}  // namespace heddle::cuda::sm90::attention_bwd

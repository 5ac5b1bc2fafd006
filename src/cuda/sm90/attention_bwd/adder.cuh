// Deterministic sums of dQ. The CTAs of all key tiles add to a query tile's sum one after the other, in a fixed order;
// p.turns counts who is next. Two threads of each CTA do so, one for even and one for odd query tiles: they wait until
// it is this CTA's turn, add what the consumer warpgroups have handed over, and pass the turn on when the sum has been
// written. That is known only microseconds later, which is why no consumer waits for it.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// Blocks of 64 rows and 64 dims that a tile's dQ has; those of one warpgroup are every other one.
template <class C>
constexpr int kQueryBlocks = C::kTileQ* C::kColumns / (64 * 64);

// One of two threads: the tiles of this parity.
template <class C>
__device__ void add_in_turns(const Params& p, SharedMemory<C>& shared, int parity) {
  const auto& w = shared.work;
  std::uint32_t phases = 0;  // of each warpgroup's hand-overs, a bit each
  int n = 0;
#pragma unroll 1
  for (QueryTiles tiles(w); tiles.left > 0; tiles.next(), n ^= 1) {
    if (n != parity) continue;
    const std::int64_t row = tiles.head * p.rows_per_head + w.statistics_row + tiles.tile() * C::kTileQ;
    int* const turn = p.turns + row / C::kTileQ;
    const int place = place_in_order<C>(p, w, tiles.step);
    while (w.takes_turns && ptx::load_acquire(turn) != place) {
    }
    ptx::fence_async();
#pragma unroll 1
    for (int block = 0; block < kQueryBlocks<C>; ++block) {
      const int warpgroup = block % kConsumers;
      ptx::barrier_wait(shared.staged[warpgroup][parity], phases >> warpgroup & 1);
      phases ^= 1u << warpgroup;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        ptx::bulk_add(p.dq + row * C::kColumns + block * (64 * 64) + warp * (16 * 64),
                      shared.staging[4 * warpgroup + warp].dq, sizeof(shared.staging[0].dq));
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read();
      ptx::barrier_arrive(shared.staging_free[warpgroup]);
    }
    ptx::bulk_wait();
    ptx::fence_async();
    ptx::add_release(turn, 1);
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

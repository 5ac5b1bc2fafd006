// The warp that brings weights and x, stage by stage.
#pragma once

#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/linear_w4a16/config.h"
#include "cuda/sm90/linear_w4a16/schedule.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

// One thread.
template <class C>
__device__ inline void produce(const Params& p, SharedMemory<C>& shared) {
  Position stage;
#pragma unroll 1
  for (int number = 0;; ++number) {
    const Part part = part_of<C>(p.schedule, number);
    if (part.begin == part.end) return;
#pragma unroll 1
    for (int block = part.begin; block < part.end; ++block) {
      const int n = stage.index;
      ptx::barrier_wait(shared.free[n], stage.phase ^ 1);
      ptx::barrier_arrive_expect(shared.ready[n], C::kStageBytes);
#pragma unroll
      for (int c = 0; c < C::kConsumers * C::kRowBlocks; ++c) {
        // Behind the last rows these once more, for nothing.
        const std::int64_t row_block = min(part.row_block + c, p.schedule.row_blocks - 1);
        ptx::bulk_load(&shared.weights[n][c], p.weights + (row_block * p.schedule.k_blocks + block),
                       sizeof(WeightBlock), shared.ready[n]);
      }
#pragma unroll
      for (int panel = 0; panel < kBlockColumns / kPanel; ++panel) {
        ptx::tma_load_4d(shared.x[n][panel], p.x, shared.ready[n], block * kBlockColumns + panel * kPanel, part.token,
                         0, 0, ptx::L2::evict_last);
      }
      stage.next<C::kStages>();
    }
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

// The warp that brings weights and x, stage by stage.
#pragma once

#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/linear_w4a16/config.h"
#include "cuda/sm90/linear_w4a16/schedule.cuh"
#include "cuda/sm90/linear_w4a8/config.h"

namespace heddle::cuda::sm90::linear_w4a8 {

using linear_w4a16::Part;
using linear_w4a16::part_of;
using linear_w4a16::Position;

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
      for (int r = 0; r < C::kConsumers * C::kRowBlocks; ++r) {
        // Behind the last rows these once more, for nothing.
        const std::int64_t row_block = min(part.row_block + r, p.schedule.row_blocks - 1);
        ptx::bulk_load(&shared.weights[n][r], p.weights + (row_block * p.schedule.k_blocks + block),
                       sizeof(WeightBlock), shared.ready[n]);
      }
      ptx::tma_load_4d(shared.x[n], p.x, shared.ready[n], block * kBlockColumns, part.token, 0, 0, ptx::L2::evict_last);
      stage.next<C::kStages>();
    }
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a8

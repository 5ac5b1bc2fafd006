// The warp that brings weights and x, stage by stage.
#pragma once

#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/linear_w4a16/config.h"

namespace heddle::cuda::sm90::linear_w4a16 {

// One thread.
template <class C>
__device__ inline void produce(const Params& p, const Work& w, SharedMemory<C>& shared) {
  Position stage;
#pragma unroll 1
  for (int block = w.begin; block < w.end; ++block) {
    const int n = stage.index;
    ptx::barrier_wait(shared.free[n], stage.phase ^ 1);
    ptx::barrier_arrive_expect(shared.ready[n], C::kStageBytes);
#pragma unroll
    for (int c = 0; c < C::kConsumers; ++c) {
      ptx::bulk_load(&shared.stages.weights[n][c],
                     p.weights + (static_cast<std::int64_t>(w.row_block + c) * p.parts.k_blocks + block),
                     sizeof(WeightBlock), shared.ready[n]);
    }
#pragma unroll
    for (int panel = 0; panel < kBlockColumns / kPanel; ++panel) {
      ptx::tma_load_4d(shared.stages.x[n][panel], p.x, shared.ready[n], block * kBlockColumns + panel * kPanel, w.token,
                       0, 0, ptx::L2::evict_last);
    }
    stage.next<C::kStages>();
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

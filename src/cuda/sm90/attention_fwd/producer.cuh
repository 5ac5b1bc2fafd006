// The threads that bring q, k and v to shared memory.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/producer.cuh"
#include "cuda/sm90/attention_fwd/guard.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// Brings the tiles of a bias or mask that a tile of q meets, in the order in which keys come.
template <class C, int kElement>
__device__ __forceinline__ void produce_plane(const Params& p, const ScorePlane& x, SharedMemory<C>& shared,
                                              RingPosition<C::kPlaneStages>& stage, int position, int h, int b,
                                              const typename C::Walk& walk) {
  constexpr int kColumns = 128 / kElement, kBytes = kRows * C::kTileK * kElement;
  if (x.stride_h == 0) h = 0;
  if (x.stride_b == 0) b = 0;
#pragma unroll 1
  for (int step = walk.steps().end - 1; step >= walk.steps().begin; --step, stage.next()) {
    const int key = walk.index(step) * C::kTileK;
#pragma unroll 1
    for (int c = 0; c < C::kConsumers; ++c) {
      auto& ready = shared.bulk_ready[c][stage.index];
      await_free(shared.bulk_free[c][stage.index], stage.phase);
      ptx::barrier_arrive_expect(ready, kBytes);
#pragma unroll
      for (int panel = 0; panel < C::kTileK / kColumns; ++panel) {
        ptx::tma_load_4d(shared.bulk[c][stage.index].bytes + panel * (kRows * 128), p.plane, ready,
                         key + panel * kColumns, position + c * kRows, h, b, ptx::L2::evict_normal);
      }
    }
  }
}

// Brings q, and a bias or mask that comes in bulk. One thread, another than that of keys, so that q never waits until a
// stage of keys is free.
template <class C>
__device__ void produce_q(const Params& p, SharedMemory<C>& shared) {
  std::uint32_t phase = 0;
  RingPosition<C::kPlaneStages> plane;
  for (RingPosition<kWorkSlots> slot;; slot.next()) {
    ptx::barrier_wait(shared.work_ready[slot.index], slot.phase);
    const TileWork<typename C::Walk>& w = shared.work[slot.index];
    const int position = w.position;
    if (position == kNoMoreTiles) return;
    const int h = w.h, b = p.cu_seqlens_q != nullptr ? 0 : w.sequence, row = w.q_row + position;
    const int sequence = w.sequence;
    const typename C::Walk walk = w.walk;
    ptx::barrier_arrive(shared.work_free[slot.index]);
    if (C::kRemovesPairs && position == kPause) continue;
#pragma unroll 1
    for (int c = 0; c < C::kConsumers; ++c) {
      auto& q = shared.q[c];
      await_free(shared.q_free[c], phase);
      ptx::barrier_arrive_expect(shared.q_ready[c], sizeof(q.panel[0][0]) * p.positions * p.pack * q.kPanels);
#pragma unroll
      for (int panel = 0; panel < q.kPanels; ++panel) {
        ptx::tma_load_5d(q.panel[panel], p.q, shared.q_ready[c], panel * kPanel, 0, row + c * p.positions, h, b,
                         ptx::L2::evict_first);
      }
    }
    phase ^= 1;
    if constexpr (C::kHasBulkPlane) {
      if (p.bias.access == PlaneAccess::bulk) {
        produce_plane<C, 2>(p, p.bias, shared, plane, position, h, sequence, walk);
      } else if (p.mask.access == PlaneAccess::bulk) {
        produce_plane<C, 1>(p, p.mask, shared, plane, position, h, sequence, walk);
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

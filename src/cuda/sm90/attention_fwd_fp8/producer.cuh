// The threads that bring q, k and v to shared memory.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention_fwd/producer.cuh"
#include "cuda/sm90/attention_fwd_fp8/config.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

using attention_fwd::kNoMoreTiles;
using attention_fwd::load_keys;

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
        await_free(shared.k_free[k.index], k.phase);
        load_keys(shared.k[k.index], p.k, shared.k_ready[k.index], row, h, b);
        k.next();
      }
      if (n > 0) {
        await_free(shared.v_taken[v.index], v.phase);
        load_keys(shared.v[v.index], p.v, shared.v_landed[v.index], row + C::kTileK, h, b);
        v.next();
      }
    }
    ptx::barrier_arrive(shared.work_free[slot.index]);
  }
}

// Brings the q of each announced tile, to whichever warpgroup is done with its last one first. The scheduler's warp.
template <class C>
class QProducer {
 public:
  __device__ QProducer(const Params& params, SharedMemory<C>& memory) : p(params), shared(memory) {}

  __device__ void bring(const Work& w) {
    if (threadIdx.x % 32 == 0) {
      const int b = p.cu_seqlens_q != nullptr ? 0 : w.sequence;
      unsigned missing = (1u << C::kConsumers) - 1;
#pragma unroll 1
      for (int c = 0; missing != 0; c = (c + 1) % C::kConsumers) {
        if ((missing >> c & 1) == 0 || !ptx::barrier_try_wait(shared.q_free[c], phase ^ 1)) continue;
        missing &= ~(1u << c);
        ptx::barrier_arrive_expect(shared.q_ready[c], kRowBytes * p.positions * p.pack);
        ptx::tma_load_5d(shared.q[c].panel, p.q, shared.q_ready[c], 0, 0, w.q_row + w.position + c * p.positions, w.h,
                         b, ptx::L2::evict_first);
      }
    }
    phase ^= 1;
    __syncwarp();
  }

 private:
  const Params& p;
  SharedMemory<C>& shared;
  std::uint32_t phase = 0;
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

// The thread that brings q to shared memory.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention_fwd_fp8/config.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

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

// Attention forward on Hopper with q, k, v in e4m3. One CTA an SM takes query tiles from a schedule; the first
// warpgroup moves data and turns V over, the others compute. See docs/kernels/sm90_attention_fwd_fp8.md.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention/producer.cuh"
#include "cuda/sm90/attention/schedule.cuh"
#include "cuda/sm90/attention_fwd_fp8/consumer.cuh"
#include "cuda/sm90/attention_fwd_fp8/producer.cuh"
#include "cuda/sm90/attention_fwd_fp8/transposer.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_fwd_fp8_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q, &p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    constexpr int kConsumerWarps = 4 * C::kConsumers;
    for (int i = 0; i < kWorkSlots; ++i) {
      ptx::barrier_init(shared.work_ready[i], 1);
      ptx::barrier_init(shared.work_free[i],
                        32 * (kConsumerWarps + C::kTransposers) + 1);  // every thread that reads it
      shared.work[i].spoiled = 0;
    }
    ptx::barrier_init(shared.work_ending, 1);
    shared.packed_place = {.heads = 1};
    for (int c = 0; c < C::kConsumers; ++c) {
      ptx::barrier_init(shared.q_ready[c], 1);
      ptx::barrier_init(shared.q_free[c], 4);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.k_ready[i], 1);
      ptx::barrier_init(shared.k_free[i], kConsumerWarps);
      ptx::barrier_init(shared.v_landed[i], 1);
      ptx::barrier_init(shared.v_taken[i], C::kTransposers);
      ptx::barrier_init(shared.v_ready[i], C::kArrivals * C::kTransposers);
      ptx::barrier_init(shared.v_free[i], C::kArrivals * kConsumerWarps);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) {
      attention::produce_keys<C>(p, shared, shared.v_taken,
                                 [&](const Work&, int, int stage) -> ptx::Barrier& { return shared.v_landed[stage]; });
    }
    if (warp == 1) {
      QProducer<C> q(p, shared);
      attention::Scheduler<C, SharedMemory<C>>(p, shared).run([&](const Work& w) { q.bring(w); });
    }
    if (warp >= 2) transpose_values<C>(p, shared, warp - 2);
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    Consumer<C>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

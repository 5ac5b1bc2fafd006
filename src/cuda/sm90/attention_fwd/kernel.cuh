// Exact attention forward on Hopper. One CTA an SM takes query tiles from a schedule; the first warpgroup moves data,
// the others compute. See docs/kernels/sm90_attention_fwd.md.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention/schedule.cuh"
#include "cuda/sm90/attention_fwd/consumer.cuh"
#include "cuda/sm90/attention_fwd/producer.cuh"

namespace heddle::cuda::sm90::attention_fwd {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_fwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.q, &p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    constexpr int kConsumerWarps = 4 * C::kConsumers;
    for (int i = 0; i < kWorkSlots; ++i) {
      ptx::barrier_init(shared.work_ready[i], 1);
      ptx::barrier_init(shared.work_free[i], 32 * (kConsumerWarps + 1) + 2);  // every thread that reads it
      shared.work[i] = {};
    }
    ptx::barrier_init(shared.work_ending, 1);
    shared.packed_place = {.heads = 1};
    for (int c = 0; c < C::kConsumers; ++c) {
      ptx::barrier_init(shared.q_ready[c], 1);
      ptx::barrier_init(shared.q_free[c], 4);
    }
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.k_ready[i], has_key_values<C>(p) ? 2 : 1);
      ptx::barrier_init(shared.v_ready[i], 1);
      ptx::barrier_init(shared.v_landed[i], 1);
      shared.v_phase[i] = 0;
      ptx::barrier_init(shared.k_free[i], kConsumerWarps);
      ptx::barrier_init(shared.v_free[i], kConsumerWarps);
    }
    if constexpr (C::kHasBulkPlane) {
      ptx::prefetch_tensor_map(p.plane);
      for (int c = 0; c < C::kConsumers; ++c) {
        for (auto& ready : shared.bulk_ready[c]) ptx::barrier_init(ready, 1);
        for (auto& free : shared.bulk_free[c]) ptx::barrier_init(free, 4);
      }
    }
    ptx::fence_barrier_init();
  }
  if constexpr (C::kHasTerms) {
    if (threadIdx.x / 32 == 3) begin_terms<C>(shared);
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0) {
      attention::produce_keys<C>(p, shared, shared.v_free,
                                 [&](const TileWork<typename C::Walk>& w, int tile, int stage) -> ptx::Barrier& {
                                   return passes_guard<C>(p, w, tile) ? shared.v_landed[stage] : shared.v_ready[stage];
                                 });
    } else if (threadIdx.x == 32) {
      produce_q<C>(p, shared);
    } else if (warp == 2) {
      attention::Scheduler<C, SharedMemory<C>>(p, shared).run([](const TileWork<typename C::Walk>&) {});
    } else if (warp == 3) {
      guard_tiles<C>(p, shared);
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    Consumer<C>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

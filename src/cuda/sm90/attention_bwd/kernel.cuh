// Exact attention backward on Hopper. A CTA takes 128 keys of one kv head and walks over the query tiles that attend
// them, of all heads of the group: dK and dV stay in registers; dQ is summed in memory, in f32, and rounded by a second
// kernel. See docs/kernels/sm90_attention_bwd.md.
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention_bwd/adder.cuh"
#include "cuda/sm90/attention_bwd/consumer.cuh"
#include "cuda/sm90/attention_bwd/producer.cuh"
#include "cuda/sm90/attention_bwd/schedule.cuh"
#include "cuda/sm90/attention_bwd/split_consumers.cuh"

namespace heddle::cuda::sm90::attention_bwd {

template <class C>
__global__ void __launch_bounds__(kThreads, 1) attention_bwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

  let_next_grid_start();
  if (threadIdx.x / 32 == 0) {
    const bool found = find_work<C>(p, number_of_start(p), shared.work);
    if constexpr (C::kListed) {
      const bool exists = __any_sync(0xffffffff, found);
      __syncwarp();  // the first lane has written the work: a vote does not order memory
      if (exists) mark_met_keys<C>(p, shared.work, shared.met_keys);
    }
    if (threadIdx.x == 0) shared.exists = found;
  } else if (threadIdx.x == 32) {
    for (const auto* map : {&p.q, &p.d_o, &p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    for (auto* barrier : {&shared.k_ready, &shared.v_ready}) ptx::barrier_init(*barrier, 1);
    constexpr int kWarps = 4 * kConsumers;
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.q_ready[i], 1);
      ptx::barrier_init(shared.q_free[i], kWarps);
      ptx::barrier_init(shared.landed[i], 2);
    }
    for (int i = 0; i < C::kOutputStages; ++i) {
      ptx::barrier_init(shared.d_o_ready[i], 1);
      ptx::barrier_init(shared.d_o_free[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(shared.ds_ready[i], C::kSplit ? 4 : kWarps);
      ptx::barrier_init(shared.ds_free[i], kWarps);
    }
    // Every thread that writes or reads P arrives itself: racecheck does not see that a warp has met before one lane
    // arrives for all.
    ptx::barrier_init(shared.p_ready, 128);
    ptx::barrier_init(shared.p_free, 128);
    for (int c = 0; c < kConsumers; ++c) {
      for (auto& staged : shared.staged[c]) ptx::barrier_init(staged, 4);
      ptx::barrier_init(shared.staging_free[c], 1);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (!shared.exists) {
    wait_for_previous_grid();
    return;
  }

  if (warpgroup == 0) {
    ptx::registers_decrease<kProducerRegisters>();
    if (threadIdx.x / 32 == 0) produce<C>(p, shared);
    if (p.turns != nullptr && (threadIdx.x == 32 || threadIdx.x == 64)) {
      add_in_turns<C>(p, shared, static_cast<int>(threadIdx.x) / 32 - 1);
    }
  } else {
    ptx::registers_increase<kConsumerRegisters>();
    wait_for_previous_grid();
    if constexpr (!C::kSplit) {
      Consumer<C>(p, shared, warpgroup - 1).run();
    } else if (warpgroup == 1) {
      ProbabilityConsumer<C>(p, shared).run();
    } else {
      GradientConsumer<C>(p, shared).run();
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_bwd

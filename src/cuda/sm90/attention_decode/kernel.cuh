// Decode attention on Hopper: few rows, many keys, all of them read once. One CTA an SM takes an equal share of the
// keys; one warp copies, three bring q, eight attend. See docs/kernels/sm90_attention_decode.md.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/attention_decode/consumer.cuh"
#include "cuda/sm90/attention_decode/producer.cuh"
#include "cuda/sm90/attention_decode/query.cuh"

namespace heddle::cuda::sm90::attention_decode {

__device__ inline void init_barriers(Control& control, int stages, bool copies_q) {
  for (int i = 0; i < kPieces; ++i) {
    ptx::barrier_init(control.piece_ready[i], 1);
    ptx::barrier_init(control.piece_free[i], kConsumerWarps + (copies_q ? 0 : kQueryWarps));
  }
  ptx::barrier_init(control.q_requested, kQueryWarps);
  ptx::barrier_init(control.q_ready, copies_q ? 1 : 32 * kQueryWarps);
  ptx::barrier_init(control.q_free, kConsumerThreads);
  ptx::barrier_init(control.appended, kQueryWarps);
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    ptx::barrier_init(control.full[i], 1);
    ptx::barrier_init(control.empty[i], kConsumerWarps);
  }
  ptx::fence_barrier_init();
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) attention_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  const SharedMemory<C> shared{memory, p.plan};
  Control& control = shared.control();
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);

  let_next_grid_start();
  if (warp < kServiceThreads / 32) {
    ptx::registers_decrease<C::kServiceRegisters>();
    if (warp == 0) {
      // Where this CTA's work lies is found out while the barriers are made.
      if (!p.equal_lengths || p.problem.cache_batch_idx.data != nullptr) wait_for_previous_grid();
      Producer<C>(p, shared).run();
    } else {
      if (threadIdx.x == 32) init_barriers(control, p.plan.stages, copies_q<C>(p));
      QueryWarp<C> query(p, shared, warp - 1);
      if (copies_q<C>(p)) query.clear_columns();
      start();
      if (!copies_q<C>(p)) query.run();
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    start();
    Consumer<C>(p, shared, warp - kServiceThreads / 32).run();
  }
}

}  // namespace heddle::cuda::sm90::attention_decode

// Decode attention on Hopper: few rows, many keys, all of them read once. One CTA an SM takes an equal share of all
// keys; one warp copies, three bring q, eight attend. See docs/kernels/sm90_attention_decode.md.
#pragma once

#include "cuda/sm90/attention_decode/consumer.cuh"
#include "cuda/sm90/attention_decode/producer.cuh"
#include "cuda/sm90/attention_decode/query.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
__global__ void __launch_bounds__(kThreads, 1) attention_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  const SharedMemory<C> shared{memory, p.plan};
  Control& control = shared.control();
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);

  if (threadIdx.x == 0) {
    for (const auto* map : {&p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    for (int i = 0; i < kPieces; ++i) {
      ptx::barrier_init(control.piece_ready[i], 1);
      ptx::barrier_init(control.piece_free[i], kConsumerWarps + kQueryWarps);
    }
    ptx::barrier_init(control.q_ready, kQueryWarps);
    ptx::barrier_init(control.q_free, kConsumerWarps);
    ptx::barrier_init(control.appended, kQueryWarps);
    for (int i = 0; i < p.plan.stages; ++i) {
      ptx::barrier_init(control.full[i], 1);
      ptx::barrier_init(control.empty[i], kConsumerWarps);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warp < kServiceThreads / 32) {
    ptx::registers_decrease<C::kServiceRegisters>();
    if (warp == 0) {
      Producer<C>(p, shared).run();
    } else {
      QueryWarp<C>(p, shared, warp - 1).run();
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    Consumer<C>(p, shared, warp - kServiceThreads / 32).run();
  }
}

}  // namespace heddle::cuda::sm90::attention_decode

// y = activation(x Wᵀ + bias) + residual with E2M1 weights and E4M3 x on Hopper, as Yᵀ = W Xᵀ with products in E4M3:
// weights are widened in registers, exactly, and multiplied from there, x comes through shared memory. A CTA for each
// multiprocessor, which go over parts of tiles.
#pragma once

#include "cuda/sm90/linear/epilogue.cuh"
#include "cuda/sm90/linear_w4a8/consumer.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) linear_w4a8_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform. 0 is the producer.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    let_next_grid_start();
    ptx::prefetch_tensor_map(p.x);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.ready[i], 1);
      ptx::barrier_init(shared.free[i], 4 * C::kRowGroups);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kProducerRegisters>();
    if (threadIdx.x == 0) linear::produce<C>(p, shared);
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    const int group = warpgroup - 1;
    Consumer<C> consumer(shared, group);
#pragma unroll 1
    for (int n = 0;; ++n) {
      const linear::Part part = linear::part_of<C>(p.schedule, n);
      if (part.begin == part.end) break;
      linear::Sums<C> sums;
      consumer.multiply(part.end - part.begin, sums);
      linear::finish<C>(p.out, p.schedule, shared, linear::recomputed(n), group, sums);
    }
    linear::finish_shared<C>(p.out, p.schedule, shared, group);
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a8

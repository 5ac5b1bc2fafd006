// y = activation(x Wᵀ + bias) + residual with E2M1 weights and E4M3 x on Hopper, as Yᵀ = W Xᵀ with products in E4M3:
// weights are widened in registers, exactly, and multiplied from there. A CTA for each multiprocessor, which go over
// parts of tiles.
#pragma once

#include "cuda/sm90/linear_w4a16/epilogue.cuh"
#include "cuda/sm90/linear_w4a8/consumer.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) linear_w4a8_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform. 0 is the producer.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.x);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.ready[i], 1);
      ptx::barrier_init(shared.free[i], 4 * C::kConsumers);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(p, shared);
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    const int number = warpgroup - 1;
    Consumer<C> consumer(shared, number);
#pragma unroll 1
    for (int n = 0;; ++n) {
      const int blocks = linear_w4a16::blocks_of<C>(p.schedule, n);
      if (blocks == 0) return;
      linear_w4a16::Sums<C> sums;
      consumer.multiply(blocks, sums);
      const Part part = part_of<C>(p.schedule, linear_w4a16::recomputed(n));
      if (part.end < p.schedule.k_blocks) {
        linear_w4a16::leave_partials<C>(p.schedule, number, sums);
        continue;
      }
      if (part.begin > 0) linear_w4a16::add_partials<C>(p.schedule, part.begin, number, sums);
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        const int block = number * C::kRowBlocks + r;
        if (part.row_block + block < p.schedule.row_blocks) linear_w4a16::store<C>(p.out, part, shared, block, sums[r]);
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a8

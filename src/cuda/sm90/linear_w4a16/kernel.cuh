// y = activation(x Wᵀ + bias) + residual with 4-bit weights and 16-bit x on Hopper, as Yᵀ = W Xᵀ: weights are decoded
// in registers and multiplied from there, x comes through shared memory. The CTAs of a cluster share out the columns.
#pragma once

#include "cuda/sm90/linear_w4a16/consumer.cuh"
#include "cuda/sm90/linear_w4a16/epilogue.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) linear_w4a16_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform. 0 is the producer.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  const Work w = describe_work<C>(p.parts);

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
    if (threadIdx.x == 0) produce<C>(p, w, shared);
    __syncwarp();
    if (p.parts.splits > 1) {
      for (int i = 0; i < kMeetings; ++i) ptx::cluster_meet();
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    const int block = warpgroup - 1;
    float sums[1][C::kAccumulators];
    multiply<C>(w, shared, block, sums[0]);
    if (p.parts.splits > 1) gather_sums<C>(p.parts.splits, shared, block, sums);
    if (finishes(p.parts.splits, block)) store<C>(p.out, w, shared, block, sums[0]);
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

// y = activation(x Wᵀ + bias) + residual on Hopper, as Yᵀ = W Xᵀ. A CTA for each multiprocessor, which go over parts of
// tiles. A producer's thread brings weights and x into shared memory. Weights are decoded in registers and multiplied
// from there, or warps of their own decode them into shared memory. The consumer's type says what the weights and the
// products are.
#pragma once

#include "cuda/any/linear/epilogue.cuh"
#include "cuda/any/linear/gather.cuh"
#include "cuda/sm90/linear/cluster.cuh"
#include "cuda/sm90/linear/producer.cuh"

namespace heddle::cuda::sm90::linear {

using cuda::linear::finish, cuda::linear::finish_shared, cuda::linear::gather, cuda::linear::Part,
    cuda::linear::part_of, cuda::linear::Sums;

template <class C, class Consumer>
__global__ void __launch_bounds__(C::kThreads, 1)
    linear_kernel(const __grid_constant__ Params<typename C::WeightBlock> p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<typename Consumer::Memory*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform. The first ones are the producer and decoders.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    let_next_grid_start();
    ptx::prefetch_tensor_map(p.x);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.ready[i], 1);
      ptx::barrier_init(shared.free[i], 4 * C::kConsumers);
    }
    if constexpr (C::kDecoders > 0) Consumer::Decoder::init_barriers(shared);
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup < C::kOthers) {
    ptx::registers_decrease<C::kOtherRegisters>();
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) produce<C>(p, shared);
    } else if constexpr (C::kDecoders > 0) {
      typename Consumer::Decoder(shared, warp - 1).run(p.schedule);
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    const int consumer_group = warpgroup - C::kOthers;
    const int row = consumer_group / C::kColumnGroups, column = consumer_group % C::kColumnGroups;
    Consumer consumer(shared, row, column, p.x_rows);
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Part part = part_of<C>(p.schedule, n);
      if (part.begin == part.end) break;
      Sums<C> sums;
      consumer.multiply(part.end - part.begin, sums);
      if (gather<C>(shared, n, row, column, sums)) {
        if (p.schedule.cluster > 1) {
          finish_in_cluster<C>(p.out, p.schedule, shared, row, sums);
          return;
        }
        finish<C>(p.out, p.schedule, shared, recomputed(n), row, sums);
      }
    }
    if (column == 0) finish_shared<C>(p.out, p.schedule, shared, row);
  }
}

}  // namespace heddle::cuda::sm90::linear

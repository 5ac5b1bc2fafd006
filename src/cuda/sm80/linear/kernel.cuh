// y = activation(x Wᵀ + bias) + residual from Ampere on, as Yᵀ = W Xᵀ: weights are decoded in registers and multiplied
// from there (mma.sync), x comes through shared memory. A CTA for each multiprocessor, which go over parts of tiles;
// all threads copy ahead (cp.async), and multiply.
#pragma once

#include "cuda/any/linear/epilogue.cuh"
#include "cuda/any/linear/gather.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/sm80/linear/consumer.cuh"
#include "cuda/sm80/linear/loader.cuh"

namespace heddle::cuda::sm80::linear {

using cuda::linear::finish, cuda::linear::finish_shared, cuda::linear::gather, cuda::linear::Part,
    cuda::linear::part_of, cuda::linear::Sums;

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) linear_kernel(const __grid_constant__ Params p) {
  using D = typename C::Decoder;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  constexpr std::uint32_t kStage = sizeof(Stage<C>);
  const std::uint32_t stages = ptx::pinned(ptx::shared_address(memory + sizeof(SharedMemory<C>)));
  const std::uint32_t end = ptx::pinned(stages + static_cast<std::uint32_t>(p.stages) * kStage);
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  const int row = group / C::kColumnGroups, column = group % C::kColumnGroups;
  let_next_grid_start();

  // The first units' weights may come before the grid before this one has ended; x may be what that one writes.
  Loader<C> loader(p, row, column);
  {
    Loader<C> ahead = loader;
#pragma unroll 1
    for (int i = 0; i + 1 < p.stages && !ahead.done(); ++i, ahead.next()) ahead.weights(stages + i * kStage);
  }
  if constexpr (D::kTable) {
    auto* const table = reinterpret_cast<std::uint32_t*>(memory + sizeof(SharedMemory<C>) + p.stages * kStage);
    D::write_table(p, table, static_cast<int>(threadIdx.x), C::kThreads);
    __syncthreads();
  }
  wait_for_previous_grid();
#pragma unroll 1
  for (int i = 0; i + 1 < p.stages; ++i) {
    if (!loader.done()) {
      loader.x(stages + i * kStage);
      loader.next();
    }
    ptx::copy_async_commit();
  }

  Consumer<C> consumer(p, end, row, column);
  std::uint32_t from = stages, to = end - kStage;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Part part = part_of<C>(p.schedule, n);
    if (part.begin == part.end) break;
    Sums<C> sums;
    Consumer<C>::clear(sums);
    const bool upper = p.out.m - part.token > C::kTokens / 2;
#pragma unroll 1
    for (int unit = part.begin; unit < part.end; ++unit) {
      wait_for_stage(p.stages);
      ptx::barrier_sync(1 + 3 * C::kRowGroups + column, C::kSharers);  // others' copies; all have read what comes next
      if (!loader.done()) {
        loader.weights(to);
        loader.x(to);
        loader.next();
      }
      ptx::copy_async_commit();
      if (unit * C::kUnitBlocks + column < p.schedule.k_blocks) consumer.multiply(from, upper, sums);
      to = from;
      from = from + kStage == end ? stages : from + kStage;
    }
    if (gather<C>(shared, n, row, column, sums)) finish<C>(p.out, p.schedule, shared, recomputed(n), row, sums);
  }
  if (column == 0) finish_shared<C>(p.out, p.schedule, shared, row);
}

}  // namespace heddle::cuda::sm80::linear

// Gradients over lists one behind the other: one grid, which goes from round to round.
#pragma once

#include "cuda/common/sparse/csr.cuh"
#include "cuda/sm80/sparse_bwd/finish.cuh"
#include "cuda/sm80/sparse_bwd/kernel.cuh"

namespace heddle::cuda::sm80::sparse_bwd {

struct CsrParams : Params {
  sparse::Csr csr;
  std::int64_t rows_of_sequence;  // of rows_per_head, if sequences are not packed
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) rounds_kernel(const __grid_constant__ CsrParams p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const auto join = [&](const sparse::Round& round) {
    if (p.dk.data != nullptr || p.dv.data != nullptr) {
      const std::int64_t floats = std::int64_t{p.subs} * 2 * p.tile_keys * C::kHeadSize;
#pragma unroll 1
      for (std::int64_t n = blockIdx.x; n < p.numbers() * kAddingBlocks; n += gridDim.x) {
        add_items<C::kThreads>(p, floats, n / kAddingBlocks, static_cast<int>(n % kAddingBlocks),
                               sparse::this_thread());
      }
    }
    if (p.dq.data == nullptr) return;
    constexpr int kLanes = C::kHeadSize / 8;
    const std::int64_t before = p.csr.room_before(round.first * p.units);
    sparse::for_threads<C::kThreads, kLanes>(std::int64_t{round.count} * p.units * p.rows, [&](std::int64_t row) {
      const std::int64_t at = row / p.rows, within = row - at * p.rows;
      const std::int64_t first = (p.csr.room_before(round.first * p.units + at) - before) * p.subs;
      join_parts<typename C::Element, C::kHeadSize>(
          p, round.first + at / p.units, at % p.units, within, sparse::this_thread() % kLanes, p.csr.used[at],
          [&](int part) { return (first + part) * p.rows + within; }, [](int) { return true; });
    });
  };
  sparse::for_rounds<C::kThreads>(
      p, p.csr, [&](auto n) { meet_item<C>(p, n, shared); }, join);
}

}  // namespace heddle::cuda::sm80::sparse_bwd

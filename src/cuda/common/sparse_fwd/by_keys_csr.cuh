// Forward by keys of lists one behind the other: one grid, which goes from round to round.
#pragma once

#include "cuda/common/sparse/csr.cuh"
#include "cuda/common/sparse_fwd/by_keys.cuh"
#include "cuda/common/sparse_fwd/combine.cuh"

namespace heddle::cuda::sparse_fwd::by_keys {

struct CsrParams : Params {
  sparse::Csr csr;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) rounds_kernel(const __grid_constant__ CsrParams p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const auto join = [&](const sparse::Round& round) {
    constexpr int kLanes = C::kHeadSize / 8;
    const std::int64_t before = p.csr.room_before(round.first * p.units);
    sparse::for_threads<C::kThreads, kLanes>(std::int64_t{round.count} * p.units * p.rows, [&](std::int64_t row) {
      const std::int64_t at = row / p.rows, within = row - at * p.rows;
      const std::int64_t first = (p.csr.room_before(round.first * p.units + at) - before) * p.subs;
      join_parts<typename C::Element, C::kHeadSize>(
          p, round.first + at / p.units, at % p.units, within, sparse::this_thread() % kLanes, p.csr.used[at] * p.subs,
          [&](int part) { return (first + part) * p.rows + within; }, [](int, bool used) { return used; });
    });
  };
  sparse::for_rounds<C::kThreads>(
      p, p.csr, [&](auto n) { meet_item<C, true>(p, n(), shared); }, join);
}

}  // namespace heddle::cuda::sparse_fwd::by_keys

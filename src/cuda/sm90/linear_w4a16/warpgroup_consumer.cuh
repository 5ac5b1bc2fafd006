// A warpgroup: its rows of W times all tokens of the tile, of its columns, by wgmma. Weights of half a block are
// decoded into registers while the products of the half before run.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma_narrow.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a16/config.h"

namespace heddle::cuda::sm90::linear_w4a16 {

using cuda::linear::codes_at, cuda::linear::HalfBlock, cuda::linear::load_half, cuda::linear::scales_at;

template <class C>
class WarpgroupConsumer {
 public:
  using Memory = SharedMemory<C>;

  __device__ WarpgroupConsumer(SharedMemory<C>& memory, int row_group, int column_group, int x_rows)
      : shared(memory), panel_bytes(x_rows * linear::kPanelBytes), first_panel(C::kBlockPanels * column_group) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const std::uint32_t block = ptx::shared_address(&memory.weights[0][row_group][column_group]);
    codes = ptx::pinned(block + codes_at(thread));
    scales = ptx::pinned(block + scales_at(thread));
    ready = ptx::pinned(ptx::shared_address(memory.ready));
  }

  // The next `units`. Where a unit has no block of columns for this warpgroup, x is zero and the weights are others.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[0][i] = 0.0f;
    Operands first, second;  // registers of their own, or the compiler does not see that no product reads them then
    int before = -1;         // stage whose products may be under way
#pragma unroll 1
    for (; units > 0; --units) {
      const int n = stage.index;
      await_filled(ready + n * static_cast<int>(sizeof(ptx::Barrier)), stage.phase);
      const HalfBlock halves[2] = {load(n, 0), load(n, 1)};
      decode_half(halves[0], first);
      issue(n, 0, first, sums[0]);
      wgmma_wait<1>();
      if (before >= 0) release_after_products(shared.free[before]);
      decode_half(halves[1], second);
      issue(n, 1, second, sums[0]);
      wgmma_wait<1>();
      before = n;
      stage.next();
    }
    wgmma_wait<0>();
    keep(sums[0]);
    release_after_products(shared.free[before]);
  }

 private:
  using T = typename C::Element;
  using Operands = std::uint32_t[4][4];

  __device__ HalfBlock load(int n, int half) {
    const int at = n * static_cast<int>(sizeof(shared.weights[0]));
    return load_half(codes + at, scales + at, half);
  }

  __device__ static void decode_half(const HalfBlock& weights, Operands& operands) {
    decode<T, 0>(weights, reinterpret_cast<std::uint32_t(&)[2][4]>(operands[0]));
    decode<T, 1>(weights, reinterpret_cast<std::uint32_t(&)[2][4]>(operands[2]));
  }

  __device__ void issue(int n, int half, const Operands& operands, float (&sums)[C::kAccumulators]) {
    const Swizzled128 x(reinterpret_cast<const std::byte*>(shared.x[n]) + (first_panel + half) * panel_bytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<T, C::kTokens>::template registers_shared<false>(sums, operands[step], x.at(step * 32), true);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  const int panel_bytes, first_panel;
  std::uint32_t codes, scales, ready;  // addresses in shared memory, of the first stage
  RingPosition<C::kStages> stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a16

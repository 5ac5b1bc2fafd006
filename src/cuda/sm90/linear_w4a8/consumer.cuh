// A warpgroup: its rows of W times all tokens of the tile. The tensor cores' sums keep few bits, so those of a unit's
// 128 columns are added to others in float32.
#pragma once

#include "cuda/common/ptx/shared.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a8/config.h"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class Consumer {
 public:
  using Memory = SharedMemory<C>;
  using WeightBlock = typename C::WeightBlock;
  using Scales = typename C::Scales;

  __device__ Consumer(SharedMemory<C>& memory, int group, int /*column_group*/) : shared(memory) {
    const WeightBlock& first = memory.weights[0][group][0];
    const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
    codes = ptx::shared_address(first.codes[0][thread]);
    scales = ptx::shared_address(Scales::at(first, row, thread));
  }

  // The next `units`.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[0][i] = 0.0f;
    Operands first, second;
    Products products;
    ptx::barrier_wait(shared.ready[stage.index], stage.phase);
    decode_half(stage.index, 0, first);
#pragma unroll 1
    for (; units > 0; --units) {
      const int n = stage.index;
      issue(n, 0, first, products);
      decode_half(n, 1, second);
      issue(n, 1, second, products);
      wgmma_wait<1>();
      stage.template next<C::kStages>();
      // Behind the last unit this one's once more, for nothing.
      if (units > 1) ptx::barrier_wait(shared.ready[stage.index], stage.phase);
      decode_half(units > 1 ? stage.index : n, 0, first);
      wgmma_wait<0>();
      release(n);
      keep(products);
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[0][i] += products[i];
    }
  }

 private:
  static_assert(C::kRowBlocks == 1 && C::kUnitBlocks == 1);
  static constexpr int kStepColumns = 32, kHalfSteps = 2;
  using Operands = std::uint32_t[kHalfSteps][4];
  using Products = float[C::kAccumulators];

  __device__ void release(int n) {
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
  }

  __device__ void decode_half(int n, int half, Operands& operands) {
    const int at = n * static_cast<int>(sizeof(shared.weights[0]));
    const std::uint32_t low = ptx::load_shared_2(scales + at + half * Scales::kHalfBytes);
    const std::uint32_t high = ptx::load_shared_2(scales + at + half * Scales::kHalfBytes + 8 * Scales::kRowBytes);
    const uint4 q = ptx::load_shared_16(codes + at + half * static_cast<int>(sizeof(WeightBlock::codes[0])));
    widen(q.x, Scales::first(low), operands[0][0], operands[0][2]);
    widen(q.y, Scales::first(high), operands[0][1], operands[0][3]);
    widen(q.z, Scales::second(low), operands[1][0], operands[1][2]);
    widen(q.w, Scales::second(high), operands[1][1], operands[1][3]);
  }

  __device__ void issue(int n, int half, const Operands& operands, Products& products) {
    const Swizzled128 x(shared.x[n][0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      Wgmma<__nv_fp8_e4m3, C::kTokens>::registers_shared(products, operands[i],
                                                         x.at((half * kHalfSteps + i) * kStepColumns), half + i > 0);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  std::uint32_t codes, scales;  // addresses of this thread's in the first stage
  linear::Position stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a8

// A warpgroup: its rows of W times all tokens of the tile. The tensor cores' sums keep few bits, so those of a unit's
// 128 columns are added to others in float32.
#pragma once

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
    const WeightBlock& first = memory.weights[0][group * C::kRowBlocks][0];
    const int thread = static_cast<int>(threadIdx.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
    weights = reinterpret_cast<const std::byte*>(first.codes[0][thread]);
    scales_at = static_cast<int>(Scales::at(first, row, thread) - weights);
  }

  // The next `units`.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] = 0.0f;
    }
    Operands first, second;
    Products products;
    ptx::barrier_wait(shared.ready[stage.index], stage.phase);
    decode_half(stage.index, 0, 0, 0, first);
#pragma unroll 1
    for (; units > 0; --units) {
      const int n = stage.index;
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll 1
        for (int block = 0; block < C::kUnitBlocks; ++block) {
          issue(n, block, 0, first, products);
          decode_half(n, r, block, 1, second);
          issue(n, block, 1, second, products);
          wgmma_wait<1>();
          if (block + 1 < C::kUnitBlocks) {
            decode_half(n, r, block + 1, 0, first);
          } else if (r + 1 < C::kRowBlocks) {
            decode_half(n, r + 1, 0, 0, first);
          } else {
            stage.template next<C::kStages>();
            // Behind the last unit this one's once more, for nothing.
            if (units > 1) ptx::barrier_wait(shared.ready[stage.index], stage.phase);
            decode_half(units > 1 ? stage.index : n, 0, 0, 0, first);
          }
          wgmma_wait<0>();
        }
        if (r + 1 == C::kRowBlocks) release(n);
        keep(products);
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] += products[i];
      }
    }
  }

 private:
  static constexpr int kStepColumns = 32, kHalfSteps = 2;
  using Operands = std::uint32_t[kHalfSteps][4];
  using Products = float[C::kAccumulators];

  __device__ void release(int n) {
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
  }

  __device__ void decode_half(int n, int r, int block, int half, Operands& operands) {
    const int number = (n * C::kTileBlocks + r) * C::kUnitBlocks + block;  // of those behind first_block
    const std::byte* const at = weights + number * static_cast<int>(sizeof(WeightBlock));
    const auto* const scales = at + scales_at + half * Scales::kHalfBytes;
    const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(scales);
    const std::uint32_t high = *reinterpret_cast<const std::uint16_t*>(scales + 8 * Scales::kRowBytes);
    const uint4 codes = *reinterpret_cast<const uint4*>(at + half * sizeof(WeightBlock::codes[0]));
    widen(codes.x, Scales::first(low), operands[0][0], operands[0][2]);
    widen(codes.y, Scales::first(high), operands[0][1], operands[0][3]);
    widen(codes.z, Scales::second(low), operands[1][0], operands[1][2]);
    widen(codes.w, Scales::second(high), operands[1][1], operands[1][3]);
  }

  __device__ void issue(int n, int block, int half, const Operands& operands, Products& products) {
    const Swizzled128 x(shared.x[n][block]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      Wgmma<__nv_fp8_e4m3, C::kTokens>::registers_shared(
          products, operands[i], x.at((half * kHalfSteps + i) * kStepColumns), block + half + i > 0);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  const std::byte* weights;  // this thread's codes in the first block
  int scales_at;             // bytes from there to its first scale
  linear::Position stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a8

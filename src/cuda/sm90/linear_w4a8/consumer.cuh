// A warpgroup: its rows of W times all tokens of the tile. The tensor cores' sums keep few bits, so those of 128
// columns are added to others in float32.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a8/decode.cuh"
#include "cuda/sm90/linear_w4a8/producer.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

template <class C>
class Consumer {
 public:
  __device__ Consumer(SharedMemory<C>& memory, int number)
      : shared(memory), first_block(number * C::kRowBlocks), thread(static_cast<int>(threadIdx.x) % 128) {}

  // The next `blocks` blocks of columns.
  __device__ __forceinline__ void multiply(int blocks, linear_w4a16::Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] = 0.0f;
    }
    Operands first, second;
    Products products;
    ptx::barrier_wait(shared.ready[stage.index], stage.phase);
    decode_half(stage.index, 0, 0, first);
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      const int n = stage.index;
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        issue(n, 0, first, products);
        decode_half(n, r, 1, second);
        issue(n, 1, second, products);
        wgmma_wait<1>();
        if (r + 1 < C::kRowBlocks) {
          decode_half(n, r + 1, 0, first);
        } else {
          stage.next<C::kStages>();
          // Behind the last stage this one's once more, for nothing.
          const int next = blocks > 1 ? stage.index : n;
          if (blocks > 1) ptx::barrier_wait(shared.ready[next], stage.phase);
          decode_half(next, 0, 0, first);
        }
        wgmma_wait<0>();
        if (r + 1 == C::kRowBlocks) release(n);
        keep(products);
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] += products[i];
      }
    }
  }

 private:
  using Operands = std::uint32_t[2][4];  // of two steps
  using Products = float[C::kAccumulators];

  __device__ void release(int n) {
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
  }

  __device__ void decode_half(int n, int r, int half, Operands& operands) {
    const WeightBlock& weights = shared.weights[n][first_block + r];
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(&weights.exponents[row][2 * half]);
    const std::uint32_t high = *reinterpret_cast<const std::uint16_t*>(&weights.exponents[row + 8][2 * half]);
    const uint4 codes = *reinterpret_cast<const uint4*>(weights.codes[half][thread]);
    widen(codes.x, Magnitudes(low & 0xFF), operands[0][0], operands[0][2]);
    widen(codes.y, Magnitudes(high & 0xFF), operands[0][1], operands[0][3]);
    widen(codes.z, Magnitudes(low >> 8), operands[1][0], operands[1][2]);
    widen(codes.w, Magnitudes(high >> 8), operands[1][1], operands[1][3]);
  }

  __device__ void issue(int n, int half, const Operands& operands, Products& products) {
    const Swizzled128 x(shared.x[n]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * half + i;
      Wgmma<__nv_fp8_e4m3, C::kTokens>::registers_shared(products, operands[i], x.at(step * kStepColumns), step > 0);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  const int first_block, thread;
  Position stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a8

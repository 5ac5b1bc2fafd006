// A warpgroup: its rows of W times all tokens of the tile. Weights of half a block are decoded into registers while the
// products of the half before run.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a16/decode.cuh"
#include "cuda/sm90/linear_w4a16/producer.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
class Consumer {
 public:
  __device__ Consumer(SharedMemory<C>& memory, int number)
      : shared(memory), consumer(number), thread(static_cast<int>(threadIdx.x) % 128) {}

  // The next `blocks` blocks of columns.
  __device__ __forceinline__ void multiply(int blocks, Sums<C>& sums) {
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[r][i] = 0.0f;
    }
    Operands first, second;  // registers of their own, or the compiler does not see that no product reads them then
    int before = -1;         // stage whose products may be under way
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      const int n = stage.index;
      ptx::barrier_wait(shared.ready[n], stage.phase);
      decode_half(n, 0, first);
      issue(n, 0, first, sums[0]);
      wgmma_wait<1>();
      if (before >= 0) release(before);
      decode_half(n, 1, second);
      issue(n, 1, second, sums[0]);
      wgmma_wait<1>();
      before = n;
      stage.next<C::kStages>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) keep(sums[r]);
    release(before);
  }

 private:
  using T = typename C::Element;
  using Operands = std::uint32_t[4][4];

  __device__ void release(int n) {
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
  }

  __device__ void decode_half(int n, int half, Operands& operands) {
    const WeightBlock& weights = shared.weights[n][consumer];
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const uint4 codes = *reinterpret_cast<const uint4*>(weights.codes[half][thread]);
    const std::uint32_t low = *reinterpret_cast<const std::uint32_t*>(&weights.scales[row][4 * half]);
    const std::uint32_t high = *reinterpret_cast<const std::uint32_t*>(&weights.scales[row + 8][4 * half]);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint32_t q = step == 0 ? codes.x : step == 1 ? codes.y : step == 2 ? codes.z : codes.w;
      decode<T>(q, scale_pair<T>(low, step), scale_pair<T>(high, step), operands[step]);
    }
  }

  __device__ void issue(int n, int half, const Operands& operands, float (&sums)[C::kAccumulators]) {
    const Swizzled128 x(shared.x[n][half]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<T, C::kTokens>::template registers_shared<false>(sums, operands[step], x.at(step * 32), true);
    }
    wgmma_commit();
  }

  SharedMemory<C>& shared;
  const int consumer, thread;
  Position stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a16

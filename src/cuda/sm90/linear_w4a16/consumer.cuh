// A warpgroup: 64 rows of W times all tokens of the tile. Each step's weights are decoded into registers while the
// products of the step before run.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a16/decode.cuh"
#include "cuda/sm90/linear_w4a16/producer.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

template <class C>
__device__ inline void multiply(const Work& w, SharedMemory<C>& shared, int consumer, float (&sums)[C::kAccumulators]) {
  using T = typename C::Element;
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < C::kAccumulators; ++i) sums[i] = 0.0f;
  Position stage;
#pragma unroll 1
  for (int block = w.begin; block < w.end; ++block) {
    const int n = stage.index;
    ptx::barrier_wait(shared.ready[n], stage.phase);
    const WeightBlock& weights = shared.stages.weights[n][consumer];
    const Swizzled128 x(shared.stages.x[n]);
    const uint2 low = *reinterpret_cast<const uint2*>(weights.scales[row]);
    const uint2 high = *reinterpret_cast<const uint2*>(weights.scales[row + 8]);
    std::uint32_t operand[2][4];
#pragma unroll
    for (int four = 0; four < kSteps / 4; ++four) {
      const uint4 codes = *reinterpret_cast<const uint4*>(weights.codes[four][thread]);
      const std::uint32_t low4 = four == 0 ? low.x : low.y, high4 = four == 0 ? high.x : high.y;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint32_t q = step == 0 ? codes.x : step == 1 ? codes.y : step == 2 ? codes.z : codes.w;
        auto& a = operand[step % 2];
        decode<T>(q, scale_pair<T>(low4, step), scale_pair<T>(high4, step), a);
        wgmma_fence();
        Wgmma<T, C::kTokens>::template registers_shared<false>(
            sums, a, x.at(four * C::kTokens * kPanel * sizeof(T) + step * 32), true);
        wgmma_commit();
        wgmma_wait<1>();
      }
    }
    wgmma_wait<0>();
    keep(sums);
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
    stage.next<C::kStages>();
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

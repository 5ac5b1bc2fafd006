// y = activation(x Wᵀ + bias) + residual with E2M1 weights and E4M3 x on Hopper, as Yᵀ = W Xᵀ with products in E4M3:
// weights are widened in registers, exactly, and multiplied from there. The tensor cores' sums keep few bits, so after
// 128 columns they are added to others in float32. The CTAs of a cluster share out the columns.
#pragma once

#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/linear_w4a16/config.h"
#include "cuda/sm90/linear_w4a16/epilogue.cuh"
#include "cuda/sm90/linear_w4a8/config.h"

namespace heddle::cuda::sm90::linear_w4a8 {

// One thread.
template <class C>
__device__ inline void produce(const Params& p, const Work& w, SharedMemory<C>& shared) {
  linear_w4a16::Position stage;
#pragma unroll 1
  for (int block = w.begin; block < w.end; ++block) {
    const int n = stage.index;
    ptx::barrier_wait(shared.free[n], stage.phase ^ 1);
    ptx::barrier_arrive_expect(shared.ready[n], C::kStageBytes);
#pragma unroll
    for (int r = 0; r < C::kConsumers * C::kRowBlocks; ++r) {
      ptx::bulk_load(&shared.stages.weights[n][r],
                     p.weights + (static_cast<std::int64_t>(w.row_block + r) * p.parts.k_blocks + block),
                     sizeof(WeightBlock), shared.ready[n]);
    }
    ptx::tma_load_4d(shared.stages.x[n], p.x, shared.ready[n], block * kBlockColumns, w.token, 0, 0,
                     ptx::L2::evict_last);
    stage.next<C::kStages>();
  }
}

// E4M3 bytes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, times 2^(exponent - 5).
struct Magnitudes {
  std::uint32_t low, high;
  __device__ explicit Magnitudes(std::uint32_t exponent)
      : low(exponent * 0x08080800 + 0x14100800), high(exponent * 0x08080808 + 0x24201C18) {}
};

// The two registers of a row in an operand.
__device__ inline void widen(std::uint32_t q, const Magnitudes& m, std::uint32_t& first, std::uint32_t& second) {
  constexpr std::uint32_t kSigns = 0x80808080;
  const std::uint32_t which = q & 0x77777777;
  first = __byte_perm(m.low, m.high, which) | (q & kSigns);
  second = __byte_perm(m.low, m.high, which >> 16) | (q << 4 & kSigns);
}

// A warpgroup: kRowBlocks times 64 rows of W with all tokens of the tile.
template <class C>
__device__ inline void multiply(const Work& w, SharedMemory<C>& shared, int first_block,
                                float (&sums)[C::kRowBlocks][C::kAccumulators]) {
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) sums[block][i] = 0.0f;
  }
  linear_w4a16::Position stage;
#pragma unroll 1
  for (int k = w.begin; k < w.end; ++k) {
    const int n = stage.index;
    ptx::barrier_wait(shared.ready[n], stage.phase);
    const Swizzled128 x(shared.stages.x[n]);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
      const WeightBlock& weights = shared.stages.weights[n][first_block + block];
      const std::uint32_t low = *reinterpret_cast<const std::uint32_t*>(weights.exponents[row]);
      const std::uint32_t high = *reinterpret_cast<const std::uint32_t*>(weights.exponents[row + 8]);
      float products[C::kAccumulators];
      std::uint32_t operand[2][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 codes = *reinterpret_cast<const uint2*>(&weights.codes[step / 2][thread][step % 2 * 2]);
        auto& a = operand[step % 2];
        widen(codes.x, Magnitudes(low >> 8 * step & 0xFF), a[0], a[2]);
        widen(codes.y, Magnitudes(high >> 8 * step & 0xFF), a[1], a[3]);
        wgmma_fence();
        Wgmma<__nv_fp8_e4m3, C::kTokens>::registers_shared(products, a, x.at(step * kStepColumns), step > 0);
        wgmma_commit();
        if (step > 0 && step < kSteps - 1) wgmma_wait<1>();
      }
      wgmma_wait<0>();
      keep(products);
      if (block == C::kRowBlocks - 1 && ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i) sums[block][i] += products[i];
    }
    stage.next<C::kStages>();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) linear_w4a8_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  // Through a shuffle, so that the compiler knows it to be uniform. 0 is the producer.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  const Work w = linear_w4a16::describe_work<C>(p.parts);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(p.x);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(shared.ready[i], 1);
      ptx::barrier_init(shared.free[i], 4 * C::kConsumers);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(p, w, shared);
    __syncwarp();
    if (p.parts.splits > 1) {
      for (int i = 0; i < linear_w4a16::kMeetings; ++i) ptx::cluster_meet();
    }
  } else {
    ptx::registers_increase<C::kConsumerRegisters>();
    const int first = (warpgroup - 1) * C::kRowBlocks;
    float sums[C::kRowBlocks][C::kAccumulators];
    multiply<C>(w, shared, first, sums);
    if (p.parts.splits > 1) linear_w4a16::gather_sums<C>(p.parts.splits, shared, first, sums);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
      if (linear_w4a16::finishes(p.parts.splits, first + block)) {
        linear_w4a16::store<C>(p.out, w, shared, first + block, sums[block]);
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a8

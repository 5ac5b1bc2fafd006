// Decode attention with mma.sync: few query rows, any number of keys, which are read once and wait for nobody. Warps
// are on their own until a segment ends. See docs/kernels/sm80_attention_decode.md.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_decode/loader.cuh"
#include "cuda/sm80/attention_decode/merge.cuh"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) attention_decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Schedule<C> schedule(p, shared);
  Segment s;
  while (schedule.next(s)) {
    const Extent e = schedule.e;
    Loader<C> loader(p, e, s, shared);
    int coming = s.begin + kStepKeys * warp;
#pragma unroll 1
    for (int stage = 0; stage < C::kStages - 1; ++stage, coming += C::kWarps * kStepKeys) loader.start(coming, stage);
    load_query<C>(p, e, s, shared);
    __syncthreads();
    Consumer<C> consumer(p, e, s, shared);
    if constexpr (C::kQueryInStage) __syncthreads();
    int stage = 0;
#pragma unroll 1
    for (int first = s.begin + kStepKeys * warp; first < s.end; first += C::kWarps * kStepKeys) {
      ptx::copy_async_wait<C::kStages - 2>();
      // Scales come from other lanes' copies; the stage that is filled next was read before.
      __syncwarp();
      loader.start(coming, stage == 0 ? C::kStages - 1 : stage - 1);
      coming += C::kWarps * kStepKeys;
      consumer.step(first, stage);
      stage = stage == C::kStages - 1 ? 0 : stage + 1;
    }
    ptx::copy_async_wait<0>();
    finish_segment<C>(p, e, s, consumer, shared);
    __syncthreads();
  }
}

}  // namespace heddle::cuda::sm80::attention_decode

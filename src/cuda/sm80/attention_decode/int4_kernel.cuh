// Decode attention over a cache in 4 bits: as attention_decode_kernel, but that a warp takes the ring's keys of a
// segment first, 16 at a time, and then its blocks, one at a time.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_decode/int4_consumer.cuh"
#include "cuda/sm80/attention_decode/loader.cuh"
#include "cuda/sm80/attention_decode/merge.cuh"

namespace heddle::cuda::sm80::attention_decode {

// Starts the copy of block n of the segment's sequence, as one group.
template <class C>
__device__ void start_block(const Params& p, const Segment& s, int n, int end, SharedMemory<C>& shared, int stage) {
  if (n < end) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto* from = reinterpret_cast<const uint4*>(p.problem.int4_block(s.b, n, s.head)) + lane;
    const std::uint32_t to = ptx::shared_address(reinterpret_cast<uint4*>(&shared.stage[warp][stage].block()) + lane);
#pragma unroll
    for (unsigned i = 0; i < sizeof(Int4Keys<C::kHeadSize>) / sizeof(uint4) / 32; ++i) {
      ptx::copy_async_16(to + i * 32 * sizeof(uint4), from + i * 32, true);
    }
  }
  ptx::copy_async_commit();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention_decode_int4_kernel(const __grid_constant__ Params p) {
  static_assert(C::kStages == 2);
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Schedule<C> schedule(p, shared);
  Segment s;
  while (schedule.next(s)) {
    const Extent e = schedule.e;
    const int in_blocks = static_cast<int>(int4_blocks(e.first_slot + e.sk)) * kBlockKeys;
    const int end = min(s.end, in_blocks), ring = max(s.begin, in_blocks);
    const int end_block = (end + kBlockKeys - 1) / kBlockKeys;  // s.end may lie in the middle of one
    int n = s.begin / kBlockKeys + warp;
    start_block<C>(p, s, n, end_block, shared, 1);
    load_query<C>(p, e, s, shared);
    __syncthreads();
    Int4Consumer<C> consumer(p, e, s, shared);
    {
      Loader<C> loader(p, e, s, shared);
#pragma unroll 1
      for (int first = ring + kStepKeys * warp; first < s.end; first += C::kWarps * kStepKeys) {
        loader.start(first, 0);
        ptx::copy_async_wait<0>();
        consumer.step(first, 0);
      }
    }
    consumer.take_query();
    int stage = 1;
#pragma unroll 1
    for (; n < end_block; n += C::kWarps, stage ^= 1) {
      __syncwarp();  // the stage that is filled next was read
      start_block<C>(p, s, n + C::kWarps, end_block, shared, stage ^ 1);
      ptx::copy_async_wait<1>();
      __syncwarp();  // scales come from other lanes' copies
      consumer.block(n * kBlockKeys, stage);
    }
    ptx::copy_async_wait<0>();
    consumer.finish();
    finish_segment<C>(p, e, s, consumer, shared);
    __syncthreads();
  }
}

}  // namespace heddle::cuda::sm80::attention_decode

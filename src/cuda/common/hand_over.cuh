// Shared memory that goes round between those who fill it and those who read it (Hopper).
//
// A copy engine (TMA, bulk copies) fills it in the asynchronous proxy. No barrier orders that behind loads (LDS, LDSM)
// that are issued and have not returned: a warp that only arrives after its loads may read what was filled in later.
// So whoever gives memory back says here why its reads are over. docs/kernels/handing_over.md has the rule, what went
// wrong without it, and the list of all such places.
#pragma once

#include "cuda/common/planted.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/common/ptx/tma.cuh"

namespace heddle::cuda {

// Waits until memory is filled: in front of its reads.
__device__ inline void await_filled(ptx::Barrier& ready, std::uint32_t phase) {
  ptx::barrier_wait(ready, phase);
  planted_pause(Plant::slow_consumer, true);
}

// The barrier at an address.
__device__ inline void await_filled(std::uint32_t ready, std::uint32_t phase) {
  ptx::barrier_wait_at(ready, phase);
  planted_pause(Plant::slow_consumer, true);
}

// Waits until memory was given back: in front of a copy into it. phase: of the copy; the first one waits for nobody.
__device__ inline void await_free(ptx::Barrier& free, std::uint32_t phase) {
  ptx::barrier_wait(free, phase ^ 1);
  planted_pause(Plant::slow_producer, true);
}

// The loads of this thread are over when this returns, as far as copies are concerned.
__device__ inline void finish_reads() {
  if (kFenced && !planted(Plant::unfenced_reads)) ptx::fence_async_shared();
}

// Gives memory back that this warp has read by loads, to a copy engine. The whole warp, which arrives once.
__device__ inline void release_after_reads(ptx::Barrier& free) {
  finish_reads();
  __syncwarp();
  if (ptx::elect_one()) ptx::barrier_arrive(free);
}
// The barrier at an address.
__device__ inline void release_after_reads(std::uint32_t free) {
  finish_reads();
  __syncwarp();
  if (ptx::elect_one()) ptx::barrier_arrive_at(free);
}
// For barriers at which every thread arrives.
__device__ inline void release_after_own_reads(ptx::Barrier& free) {
  finish_reads();
  ptx::barrier_arrive(free);
}

// Gives memory back that only products have read, which this warp has waited for; or of which loads went to registers
// that such products took. The whole warp, which arrives once.
__device__ inline void release_after_products(ptx::Barrier& free) {
  if (ptx::elect_one()) ptx::barrier_arrive(free);
}

// Gives memory back that this warp has read by loads, to threads that fill it by stores: they are of the same proxy as
// loads, and the barrier orders them. The whole warp, which arrives once.
__device__ inline void release_to_stores(ptx::Barrier& free) {
  __syncwarp();
  if (ptx::elect_one()) ptx::barrier_arrive(free);
}

}  // namespace heddle::cuda

// Faults and delays that the soak plants in kernels, to see that it finds them (tests/soak). Only its own builds of
// some kernels have any: with HEDDLE_PLANTED those that the host switches on, with HEDDLE_UNFENCED one for good, since
// to ask whether a fence is to be left out takes about as long as the loads that it would wait for. Elsewhere nothing
// is planted, and these functions are empty.
#pragma once

#include "cuda/common/plants.h"
#include "cuda/common/ptx/shared.cuh"

namespace heddle::cuda {

#ifdef HEDDLE_UNFENCED
constexpr bool kFenced = false;
#else
constexpr bool kFenced = true;
#endif

#ifdef HEDDLE_PLANTED

// A source file's own, set by the host.
static __constant__ int planted_now;
static const bool planted_here =
    register_plants([](int plant) { cudaMemcpyToSymbol(planted_now, &plant, sizeof(plant)); });

__device__ inline bool planted(Plant plant) { return planted_now == static_cast<int>(plant); }

// Waits some tens of microseconds; if `seldom`, mostly not at all. __nanosleep() may take up to twice as long as it is
// told, or far less.
__device__ inline void planted_pause(Plant plant, bool seldom) {
  if (!planted(plant)) return;
  const auto time = static_cast<std::uint32_t>(clock64());
  if (seldom && (time >> 4) * 0x9E3779B1u >> 29 != 0) return;
  __nanosleep(20000 + (time & 8191));
}

#else

__device__ constexpr bool planted(Plant) { return false; }
__device__ constexpr void planted_pause(Plant, bool) {}

#endif

// Gives memory back before it is read, if that is planted; whoever calls must then not give it back again. The whole
// warp. free: the barrier's address in shared memory.
__device__ inline bool planted_release(Plant plant, std::uint32_t free) {
  if (!planted(plant)) return false;
  if (ptx::elect_one()) ptx::barrier_arrive_at(free);
  planted_pause(plant, false);
  __syncwarp();
  return true;
}
__device__ inline bool planted_release(Plant plant, ptx::Barrier& free) {
  return planted(plant) && planted_release(plant, ptx::shared_address(&free));
}

}  // namespace heddle::cuda

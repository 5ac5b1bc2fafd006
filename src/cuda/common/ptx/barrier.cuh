// How threads, warps and CTAs wait for each other, and their registers (sm_90).
#pragma once

#include "cuda/common/ptx/memory.cuh"

namespace heddle::cuda::ptx {

// ---- mbarrier: a phase ends when `arrivals` have arrived and all expected bytes have landed.

using Barrier = std::uint64_t;

__device__ inline void barrier_init(Barrier& barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// Makes barrier_init visible to the asynchronous proxy and to the other CTAs of a cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ inline void barrier_arrive_expect(Barrier& barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

__device__ inline bool barrier_try_wait(Barrier& barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

// Whether the phase of this parity has ended, without waiting at all.
__device__ inline bool barrier_test(Barrier& barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return __all_sync(0xffffffff, done != 0);
}

// Waits until the phase of this parity has ended.
__device__ inline void barrier_wait(Barrier& barrier, std::uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// ---- Barriers among some of a CTA's threads

// The `kThreads` threads that come to barrier number `kBarrier` wait for each other.
template <int kBarrier, int kThreads>
__device__ inline void barrier_sync() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Of number `number`: waits until `threads`, this warp's among them, have come or arrived.
__device__ inline void barrier_sync(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Clusters

__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster that have not ended meet; what they wrote to shared memory is there for each other.
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where CTA `rank` of the cluster has what this one has at `address` in shared memory.
__device__ inline std::uint32_t remote_address(std::uint32_t address, int rank) {
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ inline float4 load_remote_float4(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ inline float2 load_remote_float2(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// ---- Grids that follow each other (programmatic dependent launch)

// Returns when all that the grids before this one have written can be read.
__device__ inline void previous_grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid's CTAs start where there is room, up to their own previous_grid_wait().
__device__ inline void next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Warps

// True in one lane of a whole warp. Cheaper than looking at the lane's number.
__device__ inline bool elect_one() {
  std::uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- Registers of a warpgroup

template <int kRegisters>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace heddle::cuda::ptx

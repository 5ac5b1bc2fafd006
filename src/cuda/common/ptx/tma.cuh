// The tensor memory accelerator, and copies by it of neighbouring bytes (sm_90).
#pragma once

#include <cuda.h>

#include "cuda/common/ptx/barrier.cuh"

namespace heddle::cuda::ptx {

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What the L2 cache should do with lines that a copy touches.
enum class L2 : std::uint64_t {
  evict_normal = 0x1000000000000000,
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

// `bytes` neighbouring bytes, which count at `barrier`; all in multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Adds `bytes` neighbouring bytes of floats in shared memory to those in global memory; in multiples of 16. This thread
// commits and waits for it.
__device__ inline void bulk_add(float* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread has committed has left shared memory; or is done.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Box at `c` (innermost first) of a 4-D tensor into shared memory; its bytes count at `barrier`. Elements outside the
// tensor arrive as zeros and count too.
__device__ inline void tma_load_4d(void* to, const CUtensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                                   L2 hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

__device__ inline void tma_load_5d(void* to, const CUtensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                                   int c4, L2 hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

// Orders this thread's earlier accesses to shared memory before later ones of the asynchronous proxy (TMA, wgmma).
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's earlier accesses, to global memory too, before later ones of the asynchronous proxy.
__device__ inline void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace heddle::cuda::ptx

// Reading what one thread needs once (sm_80).
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace heddle::cuda::ptx {

// Past the L1 cache.
__device__ inline uint4 load_once_16(const void* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}
__device__ inline uint2 load_once_8(const void* from) {
  uint2 words;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  return words;
}

// Into the L2 cache.
__device__ inline void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

}  // namespace heddle::cuda::ptx

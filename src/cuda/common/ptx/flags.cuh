// 64-bit words by which CTAs tell each other that something is in global memory (sm_70).
#pragma once

#include <cstdint>

namespace heddle::cuda::ptx {

__device__ inline std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

}  // namespace heddle::cuda::ptx

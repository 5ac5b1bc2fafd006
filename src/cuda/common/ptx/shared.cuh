// Shared memory by its 32-bit addresses, where a pointer would be computed anew at each use (sm_90).
#pragma once

#include "cuda/common/ptx/barrier.cuh"

namespace heddle::cuda::ptx {

// Keeps an address in a register.
__device__ inline std::uint32_t pinned(std::uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

__device__ inline std::uint32_t load_shared_4(std::uint32_t from) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

__device__ inline std::uint16_t load_shared_2(std::uint32_t from) {
  std::uint16_t half;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
  return half;
}

__device__ inline std::uint32_t load_shared_1(std::uint32_t from) {
  std::uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from) : "memory");
  return byte;
}

__device__ inline void store_shared_4(std::uint32_t to, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// barrier_arrive() and barrier_wait() of the barrier at `address`.
__device__ inline void barrier_arrive_at(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ inline void barrier_wait_at(std::uint32_t address, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(address), "r"(parity)
                 : "memory");
  }
}

}  // namespace heddle::cuda::ptx

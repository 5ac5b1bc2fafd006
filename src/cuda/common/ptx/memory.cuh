// Words and 16-byte copies of a thread. One wrapper an instruction, here and in the other files of this folder; PTX
// ISA 8.x. Shared-memory addresses are 32-bit offsets in the shared window, as the instructions take them.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace heddle::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Words of 16 bytes

__device__ inline void store_relaxed_16(uint4* to, const uint4& words) {
  asm volatile(
      "{\n .reg .b64 low, high;\n .reg .b128 all;\n mov.b64 low, {%1, %2};\n mov.b64 high, {%3, %4};\n"
      " mov.b128 all, {low, high};\n st.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}

__device__ inline uint4 load_relaxed_16(const uint4* from) {
  uint4 words;
  asm volatile(
      "{\n .reg .b64 low, high;\n .reg .b128 all;\n ld.relaxed.gpu.global.b128 all, [%4];\n"
      " mov.b128 {low, high}, all;\n mov.b64 {%0, %1}, low;\n mov.b64 {%2, %3}, high;\n}"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from)
      : "memory");
  return words;
}

__device__ inline uint4 load_shared_16(std::uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}

__device__ inline void store_shared_16(std::uint32_t to, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// ---- Between CTAs, in global memory

__device__ inline int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ inline void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ---- Words that other CTAs read and write meanwhile (sm_70)

__device__ inline void store_relaxed(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ inline std::uint64_t load_relaxed(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// ---- Asynchronous copies of 16 bytes (sm_80)

// Unless `exists`, zeros arrive and nothing is read.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool exists) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.u32 p, %2, 0;\n"
      " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<std::uint32_t>(exists))
      : "memory");
}

// Four bytes; unless `exists`, a zero arrives and nothing is read.
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool exists) {
  asm volatile(
      "{\n .reg .pred p;\n setp.eq.u32 p, %2, 0;\n"
      " cp.async.ca.shared.global [%0], [%1], 4, p;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<std::uint32_t>(exists))
      : "memory");
}

// The first `bytes` of kBytes (4 or 16) are copied, the rest become zeros and are not read.
template <int kBytes>
__device__ inline void copy_async(std::uint32_t to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest `kPending` committed groups of this thread have landed.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace heddle::cuda::ptx

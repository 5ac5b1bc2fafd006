// Sums in global memory that many CTAs add to, in any order or in turns.
#pragma once

#include <cuda_runtime_api.h>

namespace heddle::cuda {

// A fragment is 128 floats, four of each lane of a warp, in the order in which a warp adds to them fastest. All lanes
// of a warp add x to it, or read it; from sm_90 on four floats in one instruction.
#if __CUDA_ARCH__ >= 900

__device__ inline void add_fragment(float* fragment, unsigned lane, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(fragment + 4 * lane), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ inline void load_fragment(const float* fragment, unsigned lane, float (&x)[4]) {
  const float4 words = reinterpret_cast<const float4*>(fragment)[lane];
  x[0] = words.x;
  x[1] = words.y;
  x[2] = words.z;
  x[3] = words.w;
}

#else

__device__ inline void add_fragment(float* fragment, unsigned lane, const float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(fragment + 32 * i + lane), "f"(x[i]) : "memory");
  }
}

__device__ inline void load_fragment(const float* fragment, unsigned lane, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fragment[32 * i + lane];
}

#endif

// Turns of CTAs: a counter says how many have been there. All threads of a CTA wait until it is `turn`; then they see
// what those before wrote.
__device__ inline void wait_for_turn(const int* counter, int turn) {
  if (threadIdx.x == 0) {
    int value;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    } while (value != turn);
  }
  __syncthreads();
}

__device__ inline void end_turn(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace heddle::cuda

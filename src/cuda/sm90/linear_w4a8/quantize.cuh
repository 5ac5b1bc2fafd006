// Rows of x in E4M3, each with a scale of its own: the largest magnitude becomes 448.
#pragma once

#include <cstdint>

#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {

constexpr int kQuantizeThreads = 256;

// Of two, the larger, or the NaN.
__device__ inline float larger(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

// One block a row. x: [M, columns], rows `stride` elements apart and aligned to 16 bytes; columns: a multiple of 8.
// to: [M, pitch], zeros behind the columns. scales: [M]; NaN where a row is not finite, which spoils the row of y as it
// should.
template <class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows_kernel(const T* x, std::int64_t stride, int columns, int pitch, std::uint8_t* to, float* scales) {
  let_next_grid_start();
  wait_for_previous_grid();
  constexpr float kLargest = 448.0f;
  constexpr int kPiece = 8;
  __shared__ float of_warp[kQuantizeThreads / 32];
  const std::int64_t row = blockIdx.x;
  const uint4* const from = reinterpret_cast<const uint4*>(x + row * stride);
  const int thread = static_cast<int>(threadIdx.x), pieces = columns / kPiece;
  float largest = 0.0f;
#pragma unroll 4
  for (int i = thread; i < pieces; i += kQuantizeThreads) {
    const uint4 words = from[i];
#pragma unroll
    for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) {
      const float2 two = ptx::unpack2<T>(word);
      largest = larger(larger(largest, fabsf(two.x)), fabsf(two.y));
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, largest, lanes);
    largest = larger(largest, other);
  }
  if (thread % 32 == 0) of_warp[thread / 32] = largest;
  __syncthreads();
  for (const float other : of_warp) largest = larger(largest, other);
  const bool finite = largest < INFINITY;
  if (thread == 0) scales[row] = finite ? largest / kLargest : NAN;
  const float factor = finite && largest > 0.0f ? fminf(kLargest / largest, 3.0e38f) : 0.0f;  // not infinite
  uint2* const out = reinterpret_cast<uint2*>(to + row * pitch);
#pragma unroll 4
  for (int i = thread; i < pieces; i += kQuantizeThreads) {
    const uint4 words = from[i];
    const float2 a = ptx::unpack2<T>(words.x), b = ptx::unpack2<T>(words.y), c = ptx::unpack2<T>(words.z),
                 d = ptx::unpack2<T>(words.w);
    out[i] = make_uint2(ptx::pack4_e4m3(a.x * factor, a.y * factor, b.x * factor, b.y * factor),
                        ptx::pack4_e4m3(c.x * factor, c.y * factor, d.x * factor, d.y * factor));
  }
  for (int i = pieces + thread; i < pitch / kPiece; i += kQuantizeThreads) out[i] = make_uint2(0, 0);
}

}  // namespace heddle::cuda::sm90::linear_w4a8

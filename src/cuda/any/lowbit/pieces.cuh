// Weights and codes on their way between memory and registers, some columns of a row at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/ptx/arithmetic.cuh"
#include "problem/quantize.h"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::Weights;

// Of the larger magnitude, or the NaN.
__device__ inline float larger(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}
__device__ inline float smaller(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

__device__ inline float load_weight(const Weights& weights, std::int64_t n, std::int64_t k) {
  const std::int64_t at = n * weights.stride_n + k * weights.stride_k;
  if (weights.dtype == DType::f32) return reinterpret_cast<const float*>(weights.data)[at];
  if (weights.dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(weights.data)[at]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(weights.data)[at]);
}

template <class T, int kCount>
__device__ inline void unpack_words(const uint4 (&words)[kCount / 8], float (&w)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const std::uint32_t word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = ptx::unpack2<T>(word[j]);
      w[8 * i + 2 * j] = two.x, w[8 * i + 2 * j + 1] = two.y;
    }
  }
}

template <class T>
__device__ inline uint4 packed_words(const float (&w)[8]) {
  return make_uint4(ptx::pack2<T>(w[0], w[1]), ptx::pack2<T>(w[2], w[3]), ptx::pack2<T>(w[4], w[5]),
                    ptx::pack2<T>(w[6], w[7]));
}

// Columns k to k + count - 1 of row n, zeros behind them. wide: a row's elements lie side by side, and k's at a
// multiple of 16 bytes.
template <int kCount>
__device__ inline void load_weights(const Weights& weights, bool wide, std::int64_t n, std::int64_t k, int count,
                                    float (&w)[kCount]) {
  if (!wide || count < kCount) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) w[j] = j < count ? load_weight(weights, n, k + j) : 0.0f;
    return;
  }
  const std::int64_t at = n * weights.stride_n + k;
  if (weights.dtype == DType::f32) {
    const auto* from = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(weights.data) + at);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 four = __ldg(from + i);
      w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
    }
    return;
  }
  const auto* from = reinterpret_cast<const uint4*>(reinterpret_cast<const std::uint16_t*>(weights.data) + at);
  uint4 words[kCount / 8];
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) words[i] = __ldg(from + i);
  if (weights.dtype == DType::bf16) {
    unpack_words<__nv_bfloat16>(words, w);
  } else {
    unpack_words<__half>(words, w);
  }
}

// Eight columns from k on; wide as above.
__device__ inline void store_eight(const Weights& to, bool wide, std::int64_t n, std::int64_t k, int count,
                                   const float (&w)[8]) {
  if (!wide || count < 8) {
    const std::int64_t at = n * to.stride_n + k * to.stride_k;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= count) break;
      const std::int64_t here = at + j * to.stride_k;
      if (to.dtype == DType::f32) reinterpret_cast<float*>(to.data)[here] = w[j];
      if (to.dtype == DType::f16) reinterpret_cast<__half*>(to.data)[here] = __float2half_rn(w[j]);
      if (to.dtype == DType::bf16) reinterpret_cast<__nv_bfloat16*>(to.data)[here] = __float2bfloat16_rn(w[j]);
    }
    return;
  }
  const std::int64_t at = n * to.stride_n + k;
  if (to.dtype == DType::f32) {
    auto* const here = reinterpret_cast<float4*>(reinterpret_cast<float*>(to.data) + at);
    here[0] = make_float4(w[0], w[1], w[2], w[3]);
    here[1] = make_float4(w[4], w[5], w[6], w[7]);
    return;
  }
  auto* const here = reinterpret_cast<uint4*>(reinterpret_cast<std::uint16_t*>(to.data) + at);
  if (to.dtype == DType::bf16) {
    *here = packed_words<__nv_bfloat16>(w);
  } else {
    *here = packed_words<__half>(w);
  }
}

// Units of work over a matrix, dealt out to threads one grid apart: `of_row` to a row, rows from the last one up if
// `backwards`.
struct UnitAt {
  std::int64_t row;
  int unit;
};
class Units {
 public:
  __device__ Units(std::int64_t rows, int of_row) : rows_(rows), of_row_(of_row) {
    const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
    row_ = first / of_row, unit_ = static_cast<int>(first % of_row);
    row_step_ = step / of_row, unit_step_ = static_cast<int>(step % of_row);
  }
  __device__ bool left() const { return row_ < rows_; }
  __device__ UnitAt operator*() const { return {row_, unit_}; }
  __device__ void next() {
    row_ += row_step_;
    unit_ += unit_step_;
    if (unit_ >= of_row_) unit_ -= of_row_, ++row_;
  }

 private:
  std::int64_t rows_, row_, row_step_;
  int of_row_, unit_, unit_step_;
};

}  // namespace heddle::cuda::any::lowbit

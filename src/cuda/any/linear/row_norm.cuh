// The norm of a row of x, by the threads of a block.
#pragma once

#include <cstdint>

#include "cuda/any/linear/rows.h"
#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda::linear {

struct Sum {
  static constexpr float kNeutral = 0.0f;
  __device__ float operator()(float x, float y) const { return x + y; }
};
// Of two, the larger, or the NaN.
struct Larger {
  static constexpr float kNeutral = 0.0f;
  __device__ float operator()(float x, float y) const {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
  }
};

// Of all threads' x, in every thread. The order is one for every block.
template <int kThreads, class Combine>
__device__ inline float over_block(float x, Combine combine) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
  __syncthreads();  // what an earlier call has left was read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float all = Combine::kNeutral;
#pragma unroll
  for (const float other : of_warp) all = combine(all, other);
  return all;
}

constexpr int kPiece = 8;  // elements of 16 bytes

template <class T>
__device__ inline void load_piece(const void* from, int piece, float (&x)[kPiece]) {
  const uint4 words = static_cast<const uint4*>(from)[piece];
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = ptx::unpack2<T>(word[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}
template <class T>
__device__ inline uint4 packed_piece(const float (&x)[kPiece]) {
  return make_uint4(ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(x[4], x[5]),
                    ptx::pack2<T>(x[6], x[7]));
}

// A row as the product takes it. Every thread of the block makes one, of the same row. kAtOnce: pieces whose loads a
// thread has on their way.
template <class T, int kThreads, int kAtOnce>
class NormedRow {
 public:
  __device__ NormedRow(const NormInFront& norm, const T* row, int columns)
      : p(norm), from(row), pieces(columns / kPiece) {
    if (p.kind == Norm::layer_norm) {
      float sum = 0.0f;
      for_each_raw([&](int, const float(&x)[kPiece]) {
#pragma unroll
        for (const float one : x) sum += one;
      });
      mean = over_block<kThreads>(sum, Sum{}) / static_cast<float>(columns);
    }
    if (p.kind != Norm::none) {
      float squares = 0.0f;
      for_each_raw([&](int, const float(&x)[kPiece]) {
#pragma unroll
        for (const float one : x) squares += (one - mean) * (one - mean);
      });
      factor = 1.0f / sqrtf(over_block<kThreads>(squares, Sum{}) / static_cast<float>(columns) + p.eps);
    }
  }

  // visit(number, elements) of this thread's pieces.
  template <class Visit>
  __device__ void for_each(Visit visit) const {
    for_each_raw([&](int i, float(&x)[kPiece]) {
      if (p.kind != Norm::none) normalize(i, x);
      visit(i, x);
    });
  }

 private:
  template <class Visit>
  __device__ void for_each_raw(Visit visit) const {
#pragma unroll kAtOnce
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
      float x[kPiece];
      load_piece<T>(from, i, x);
      visit(i, x);
    }
  }

  __device__ void normalize(int i, float (&x)[kPiece]) const {
#pragma unroll
    for (float& one : x) one = (one - mean) * factor;
    float parameters[kPiece];
    if (p.weight != nullptr) {
      load_piece<T>(p.weight, i, parameters);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) x[j] *= parameters[j];
    }
    if (p.bias != nullptr) {
      load_piece<T>(p.bias, i, parameters);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) x[j] += parameters[j];
    }
  }

  const NormInFront& p;
  const T* const from;
  const int pieces;
  float mean = 0.0f, factor = 1.0f;
};

}  // namespace heddle::cuda::linear

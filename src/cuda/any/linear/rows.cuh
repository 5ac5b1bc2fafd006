// The pass over rows of x: one block a row, which it reads as often as it must, from the cache after the first time.
#pragma once

#include <cstdint>

#include "cuda/any/linear/rows.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/arithmetic.cuh"

namespace heddle::cuda::linear {

constexpr int kRowThreads = 256;

inline Grid grid_of(const RowsPass& pass) {
  return {.blocks = static_cast<unsigned>(pass.rows), .threads = kRowThreads, .overlaps = true};
}

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
template <class Combine>
__device__ inline float over_block(float x, Combine combine) {
  __shared__ float of_warp[kRowThreads / 32];
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

enum class RowsTo : std::uint8_t { same, e4m3, int8 };

template <class T, RowsTo kTo>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const RowsPass p) {
  let_next_grid_start();
  wait_for_previous_grid();
  const std::int64_t row = blockIdx.x;
  const T* const from = static_cast<const T*>(p.x) + row * p.stride;
  const int pieces = p.columns / kPiece, all = p.pitch / kPiece;
  const auto for_each_piece = [&](auto visit) {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kRowThreads) {
      float x[kPiece];
      load_piece<T>(from, i, x);
      visit(i, x);
    }
  };
  float mean = 0.0f, factor = 1.0f;
  if (p.norm == Norm::layer_norm) {
    float sum = 0.0f;
    for_each_piece([&](int, const float(&x)[kPiece]) {
#pragma unroll
      for (const float one : x) sum += one;
    });
    mean = over_block(sum, Sum{}) / static_cast<float>(p.columns);
  }
  if (p.norm != Norm::none) {
    float squares = 0.0f;
    for_each_piece([&](int, const float(&x)[kPiece]) {
#pragma unroll
      for (const float one : x) squares += (one - mean) * (one - mean);
    });
    factor = 1.0f / sqrtf(over_block(squares, Sum{}) / static_cast<float>(p.columns) + p.eps);
  }
  // What the product takes of a piece.
  const auto normed = [&](int i, float(&x)[kPiece]) {
    if (p.norm == Norm::none) return;
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
  };
  if constexpr (kTo != RowsTo::same) {
    float largest = 0.0f;
    for_each_piece([&](int i, float(&x)[kPiece]) {
      normed(i, x);
#pragma unroll
      for (const float one : x) largest = Larger{}(largest, fabsf(one));
    });
    largest = over_block(largest, Larger{});
    const bool finite = largest < INFINITY;
    std::uint8_t* const to = static_cast<std::uint8_t*>(p.to) + row * p.pitch;
    const auto store = [&](int i, std::uint32_t first, std::uint32_t second) {
      if (kTo == RowsTo::e4m3 && p.interleaved) {
        std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(to) + i / 4 * 8 + i % 4;
        words[0] = first, words[4] = second;
      } else {
        reinterpret_cast<uint2*>(to)[i] = make_uint2(first, second);
      }
    };
    if constexpr (kTo == RowsTo::int8) {  // as core/int8_rows.h does it
      const float scale = largest / 127.0f;
      if (threadIdx.x == 0) p.scales[row] = finite ? scale : NAN;
      for_each_piece([&](int i, float(&x)[kPiece]) {
        normed(i, x);
        std::uint32_t words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          const float q = finite && scale > 0.0f ? rintf(x[j] / scale) : 0.0f;
          words[j / 4] |= (static_cast<std::uint32_t>(static_cast<int>(fminf(fmaxf(q, -127.0f), 127.0f))) & 255u)
                          << j % 4 * 8;
        }
        store(i, words[0], words[1]);
      });
    } else {
      constexpr float kLargest = 448.0f;
      if (threadIdx.x == 0) p.scales[row] = finite ? largest / kLargest : NAN;
      const float scale = finite && largest > 0.0f ? fminf(kLargest / largest, 3.0e38f) : 0.0f;  // not infinite
      for_each_piece([&](int i, float(&x)[kPiece]) {
        normed(i, x);
        store(i, ptx::pack4_e4m3(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
              ptx::pack4_e4m3(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
      });
    }
    for (int i = pieces + static_cast<int>(threadIdx.x); i < all; i += kRowThreads) store(i, 0, 0);
  } else {
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(p.to) + row * p.pitch);
    for_each_piece([&](int i, float(&x)[kPiece]) {
      normed(i, x);
      to[i] = make_uint4(ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(x[4], x[5]),
                         ptx::pack2<T>(x[6], x[7]));
    });
    for (int i = pieces + static_cast<int>(threadIdx.x); i < all; i += kRowThreads) to[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace heddle::cuda::linear

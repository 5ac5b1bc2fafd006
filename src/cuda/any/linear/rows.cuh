// The pass over rows of x: one block a row, which it reads as often as it must, from the cache after the first time.
#pragma once

#include <cstdint>

#include "cuda/any/linear/row_norm.cuh"
#include "cuda/any/linear/rows.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/overlap.cuh"

namespace heddle::cuda::linear {

constexpr int kRowThreads = 256;

inline Grid grid_of(const RowsPass& pass) {
  return {.blocks = static_cast<unsigned>(pass.rows), .threads = kRowThreads, .overlaps = true};
}

enum class RowsTo : std::uint8_t { same, e4m3, int8 };

template <class T, RowsTo kTo>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const RowsPass p) {
  let_next_grid_start();
  wait_for_previous_grid();
  const std::int64_t row = blockIdx.x;
  const T* const from = static_cast<const T*>(p.x) + row * p.stride;
  const int pieces = p.columns / kPiece, all = p.pitch / kPiece;
  const NormedRow<T, kRowThreads, 4> normed(p.norm, from, p.columns);
  if constexpr (kTo != RowsTo::same) {
    float largest = 0.0f;
    normed.for_each([&](int i, float(&x)[kPiece]) {
#pragma unroll
      for (const float one : x) largest = Larger{}(largest, fabsf(one));
    });
    largest = over_block<kRowThreads>(largest, Larger{});
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
    if constexpr (kTo == RowsTo::int8) {  // as lowbit/int8_rows.h does it
      const float scale = largest / 127.0f;
      if (threadIdx.x == 0) p.scales[row] = finite ? scale : NAN;
      normed.for_each([&](int i, float(&x)[kPiece]) {
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
      normed.for_each([&](int i, float(&x)[kPiece]) {
        store(i, ptx::pack4_e4m3(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
              ptx::pack4_e4m3(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale));
      });
    }
    for (int i = pieces + static_cast<int>(threadIdx.x); i < all; i += kRowThreads) store(i, 0, 0);
  } else {
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(p.to) + row * p.pitch);
    normed.for_each([&](int i, float(&x)[kPiece]) { to[i] = packed_piece<T>(x); });
    for (int i = pieces + static_cast<int>(threadIdx.x); i < all; i += kRowThreads) to[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace heddle::cuda::linear

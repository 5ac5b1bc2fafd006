// Rows moved, floats filled and added: each number is read once and written once, by one thread. And an end to all.
#pragma once

#include "cuda/common/divisor.h"
#include "cuda/common/elements.cuh"
#include "problem/row_moves.h"

namespace heddle::cuda::any::rank_memory {

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarp * kWarps;
constexpr int kMostMoves = 64;  // of a launch, whose parameters are 4 KB at most

// A tensor [B, rows, H, units]; strides are bytes.
struct Side {
  std::byte* data;
  std::int64_t stride_b, stride_row, stride_head, stride_unit;
};

struct Params {
  Side from, to;
  std::int64_t batch, rows;  // rows: of all moves
  int heads, units;          // units: of a row of a head, each one thread's
  Divisor of_units;
  int count;  // of moves
  RowMove move[kMostMoves];
  std::int64_t first[kMostMoves];  // rows of the moves before
};
static_assert(sizeof(Params) <= 4096);

// A warp has a row of all heads. kAdd: floats are added; else a unit is copied, or a float rounded.
template <class From, class To, bool kAdd>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ Params p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
#pragma unroll 1
  for (std::int64_t at = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; at < p.batch * p.rows; at += step) {
    const std::int64_t b = at / p.rows, row = at - b * p.rows;
    int low = 0, high = p.count - 1;  // the last move that begins at the row or before is the row's
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.first[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const std::int64_t n = row - p.first[low];
    const std::byte* from =
        p.from.data + b * p.from.stride_b + (p.move[low].from + p.move[low].from_step * n) * p.from.stride_row;
    std::byte* to = p.to.data + b * p.to.stride_b + (p.move[low].to + p.move[low].to_step * n) * p.to.stride_row;
#pragma unroll 4
    for (int x = lane; x < p.heads * p.units; x += kWarp) {
      const int head = p.of_units.quotient(x), unit = x - head * p.units;
      const From value = *reinterpret_cast<const From*>(from + head * p.from.stride_head + unit * p.from.stride_unit);
      To* const target = reinterpret_cast<To*>(to + head * p.to.stride_head + unit * p.to.stride_unit);
      if constexpr (kAdd) {
        *target += value;
      } else {
        *target = static_cast<To>(value);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(float* x, std::int64_t count, float value) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; n < count; n += step) x[n] = value;
}

__global__ void __launch_bounds__(kThreads) add_kernel(float* sum, const float* x, std::int64_t count) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; n < count; n += step) sum[n] += x[n];
}

// Of one thread. Volatile: what the host has written by then, not what a cache has.
__global__ void end_if_kernel(const volatile int* failed) {
  if (*failed != 0) __trap();
}

}  // namespace heddle::cuda::any::rank_memory

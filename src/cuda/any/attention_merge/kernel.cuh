// Partial results joined. A warp finds the exponentials of its 32 / slots rows at once, and then sums their elements,
// 32 / lanes rows at a time. What a row's bits follow from is the row alone.
#pragma once

#include "cuda/any/attention_merge/row.cuh"

namespace heddle::cuda::any::attention_merge {

// Copies a launch's parts to where all of them are.
__global__ void __launch_bounds__(kHeld) write_parts_kernel(const __grid_constant__ Held held, Part* to, int count) {
  const int n = static_cast<int>(threadIdx.x);
  if (n < count) to[n] = held.part[n];
}

// An output may be one of the partials itself: a lane reads those elements of a row alone that it writes, and a warp
// has read all of its rows' lse when it writes the first.
template <class T, class Out, int kCount>
__global__ void __launch_bounds__(kThreads, 3) merge_kernel(const __grid_constant__ Params p) {
  constexpr int kPieces = kMaxHeadSize / (kWarp * kCount);
  constexpr int kPartsAtOnce = kCount == 1 ? 1 : 2;  // whose pieces are on their way before the first are used
  const Part* const parts = p.parts != nullptr ? p.parts : p.held.part;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, slot = lane % p.slots;
  const int rows_of_warp = kWarp / p.slots, rows_at_once = kWarp / p.lanes;
  const int column = lane % p.lanes * kCount, columns = p.lanes * kCount;
  const std::int64_t warp = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
#pragma unroll 1
  for (std::int64_t begin = warp * rows_of_warp; begin < p.rows;
       begin += std::int64_t{gridDim.x} * kWarps * rows_of_warp) {
    const std::int64_t row = begin + lane / p.slots;
    double exponential_of_slot;
    const Denominator denominator =
        denominator_of(p, parts, Place(p, min(row, p.rows - 1)), lane - slot, slot, exponential_of_slot);
    auto weight_of_slot = static_cast<float>(exponential_of_slot);
    const auto share_of_row = static_cast<float>(1.0 / denominator.total);
    const float lse = denominator.lse();
#pragma unroll 1
    for (int step = 0; step < rows_of_warp; step += rows_at_once) {
      const int of_warp = step + lane / p.lanes, source = of_warp * p.slots;
      const float share = __shfl_sync(kAll, share_of_row, source);
      const bool there = begin + of_warp < p.rows;
      const Place at(p, min(begin + of_warp, p.rows - 1));
      float sum[kPieces][kCount];
      bool counted = false;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sum[piece][k] = -0.0f;  // to which adding changes no sign
      }
#pragma unroll 1
      for (int from = 0; from < p.count; from += p.slots) {
        if (p.count > p.slots) {
          weight_of_slot = static_cast<float>(exponential(p, parts, at, from + slot, denominator.largest));
        }
        const int here = min(p.slots, p.count - from);
#pragma unroll 1
        for (int n = 0; n < here; n += kPartsAtOnce) {
          float weight[kPartsAtOnce];
          Piece<T, kCount> x[kPartsAtOnce][kPieces];
#pragma unroll
          for (int a = 0; a < kPartsAtOnce; ++a) {
            weight[a] = __shfl_sync(kAll, weight_of_slot, source + n + a);
            if (!there || n + a >= here) weight[a] = -1.0f;
            if (weight[a] < 0.0f) continue;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
              const int d = column + piece * columns;
              if (d < p.Dv) x[a][piece] = load<T, kCount>(parts[from + n + a].o, at, d);
            }
          }
#pragma unroll
          for (int a = 0; a < kPartsAtOnce; ++a) {
            if (weight[a] < 0.0f) continue;
            counted = true;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
              if (column + piece * columns >= p.Dv) continue;
#pragma unroll
              for (int k = 0; k < kCount; ++k) {
                sum[piece][k] = fmaf(weight[a], static_cast<float>(x[a][piece].element[k]), sum[piece][k]);
              }
            }
          }
        }
      }
      if (!there) continue;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int d = column + piece * columns;
        if (d >= p.Dv) continue;
#pragma unroll
        for (int k = 0; k < kCount; ++k) sum[piece][k] = counted ? sum[piece][k] * share : 0.0f;
        store<Out, kCount>(p.outer.o, at, d, sum[piece]);
      }
    }
    if (p.outer.lse.data != nullptr && slot == 0 && row < p.rows) *Place(p, row).in(p.outer.lse) = lse;
  }
}

}  // namespace heddle::cuda::any::attention_merge

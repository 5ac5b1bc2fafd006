// Appends to an e4m3 cache where each row of each head has a scale of its own: a warp finds it and stores the row.
#pragma once

#include "core/dtypes.h"
#include "cuda/any/kv_cache/kernel.cuh"

namespace heddle::cuda::any::kv_cache {

constexpr int kMaxHeadSize = 256, kLaneElements = kMaxHeadSize / 32;

// Element d of a row, the first tables.dims of which are rotated as those of a position.
template <class T>
__device__ float rotated_element(const RotaryTables& tables, std::int64_t position, const Row<T, 1>& row, int d) {
  const float x = to_float(row.load(d).element[0]);
  if (d >= tables.dims) return x;
  const int half = static_cast<int>(tables.dims / 2);
  const bool first = tables.interleaved ? d % 2 == 0 : d < half;
  const int pair = tables.interleaved ? d / 2 : first ? d : d - half;
  const int other = tables.interleaved ? d ^ 1 : first ? d + half : pair;
  const float y = to_float(row.load(other).element[0]);
  float a = first ? x : y, b = first ? y : x;
  angle_at<T>(tables, position, pair).turn(a, b);
  return first ? a : b;
}

// scale: where it is written, or, unless `finds`, read from; null: 1.
template <class T>
__device__ void store_scaled(const RotaryTables& tables, std::int64_t position, const Row<T, 1>& from,
                             const Row<std::uint8_t, 1>& to, int size, float* scale, bool finds) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kLaneElements], largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kLaneElements; ++n) {
    const int d = lane + 32 * n;
    x[n] = d < size ? rotated_element(tables, position, from, d) : 0.0f;
    largest = fmaxf(largest, fabsf(x[n]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, lanes));
  const float found = finds ? row_scale(largest) : scale != nullptr ? *scale : 1.0f;
  if (finds && lane == 0) *scale = found;
  const InE4m3<T> kind{found};
#pragma unroll
  for (int n = 0; n < kLaneElements; ++n) {
    const int d = lane + 32 * n;
    if (d < size) to.store(d, {kind.round(x[n])});
  }
}

// A warp takes a head of k and of v of one row after another.
template <class T>
__global__ void __launch_bounds__(kThreads) append_scaled_kernel(const __grid_constant__ AppendProblem p) {
  for_each_row(p.B, p.S, [&](std::int64_t b, std::int64_t i) {
    const std::int64_t position = p.seqlens[b] + i;
    if (position < 0 || position >= p.capacity) return;
    const std::int64_t page = p.page(b, position), slot = position % p.page_size;
    if (page < 0 || page >= p.pages) return;
    const std::int64_t turned = clamped(position, 0, p.rotary.positions - 1);
#pragma unroll 1
    for (int h = static_cast<int>(threadIdx.x) / 32; h < p.Hkv; h += kThreads / 32) {
      const auto place = [&](const Scales& scales, bool finds) {
        return scales.data == nullptr ? nullptr : finds ? scales.place(page, slot, h) : scales.place(0, 0, h);
      };
      store_scaled(p.rotary, turned, Row<T, 1>(p.k_new, b, i, h), Row<std::uint8_t, 1>(p.k_cache, page, slot, h),
                   static_cast<int>(p.D), place(p.k_scale, p.finds_k_scale), p.finds_k_scale);
      store_scaled(RotaryTables(), 0, Row<T, 1>(p.v_new, b, i, h), Row<std::uint8_t, 1>(p.v_cache, page, slot, h),
                   static_cast<int>(p.Dv), place(p.v_scale, p.finds_v_scale), p.finds_v_scale);
    }
  });
}

}  // namespace heddle::cuda::any::kv_cache

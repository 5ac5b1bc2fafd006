// A row of a head: where it is, its elements, its exponentials.
#pragma once

#include "cuda/any/attention_merge/params.h"
#include "cuda/common/elements.cuh"

namespace heddle::cuda::any::attention_merge {

constexpr unsigned kAll = 0xffffffff;

struct Place {
  std::int64_t b, i, h;

  __device__ Place(const Params& p, std::int64_t row) {
    if (p.rows <= UINT32_MAX) {
      const auto at = static_cast<unsigned>(row), heads = static_cast<unsigned>(p.H), line = at / heads;
      h = at - line * heads;
      b = line / static_cast<unsigned>(p.S);
      i = line - b * p.S;
    } else {
      const std::int64_t line = row / p.H;
      h = row - line * p.H;
      b = line / p.S;
      i = line - b * p.S;
    }
  }
  __device__ std::int64_t offset(const Rows& x) const { return b * x.stride_b + i * x.stride_i + h * x.stride_h; }
  __device__ float* in(const PerRow& x) const { return x.data + (b * x.stride_b + h * x.stride_h + i * x.stride_i); }
};

// ---- Elements

// A piece of a row: 16 bytes of the partials' dtype, in rows that are contiguous and aligned so, or one element. Of
// float32 beside partials in 16 bits it has 32 bytes, of 16 bits beside float32 it has 8.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Piece {
  T element[kCount];
};

template <class T, int kCount>
__device__ T* piece_at(const Rows& x, const Place& at, int d) {
  return reinterpret_cast<T*>(x.data) + at.offset(x) + (kCount > 1 ? d : d * x.stride_d);
}

template <class T, int kCount>
__device__ Piece<T, kCount> load(const Rows& x, const Place& at, int d) {
  return *reinterpret_cast<const Piece<T, kCount>*>(piece_at<T, kCount>(x, at, d));
}

template <class T, int kCount>
__device__ void store(const Rows& x, const Place& at, int d, const float (&values)[kCount]) {
  Piece<T, kCount> out;
#pragma unroll
  for (int k = 0; k < kCount; ++k) out.element[k] = static_cast<T>(values[k]);
  *reinterpret_cast<Piece<T, kCount>*>(piece_at<T, kCount>(x, at, d)) = out;
}

// ---- Exponentials

// The larger one; NaN if one is.
__device__ inline float larger(float x, float y) { return isnan(x) || x > y ? x : y; }

// Of a row, relative to the largest of its logarithms and the sink.
struct Denominator {
  float largest;
  double sink;   // its exponential
  double total;  // the sum of all

  // Neither keys nor a sink.
  __device__ bool empty() const { return largest == -INFINITY; }
  __device__ float lse() const { return empty() ? -INFINITY : static_cast<float>(largest + log(total)); }
};

// That of partial n; below 0 where there is none, or it has no key.
__device__ inline double exponential(const Params& p, const Part* parts, const Place& at, int n, float largest) {
  const float lse = n < p.count ? *at.in(parts[n].lse) : -INFINITY;
  return lse == -INFINITY ? -1.0 : exp(static_cast<double>(lse) - largest);
}

// By the p.slots lanes from `first` on, of which this is the slot-th, whose exponential of the last p.slots partials
// comes back in `mine`. Sums are taken in the order of the partials, the sink's exponential last. The whole warp.
__device__ inline Denominator denominator_of(const Params& p, const Part* parts, const Place& at, int first, int slot,
                                             double& mine) {
  const float sink = p.sink.data != nullptr ? p.sink.data[at.h * p.sink.stride_h] : -INFINITY;
  float largest = sink;
#pragma unroll 1
  for (int n = slot; n < p.count; n += p.slots) largest = larger(largest, *at.in(parts[n].lse));
#pragma unroll 1
  for (int distance = 1; distance < p.slots; distance *= 2) {
    largest = larger(largest, __shfl_xor_sync(kAll, largest, distance));
  }
  double total = 0.0;
#pragma unroll 1
  for (int begin = 0; begin < p.count; begin += p.slots) {
    mine = exponential(p, parts, at, begin + slot, largest);
#pragma unroll 1
    for (int n = 0; n < min(p.slots, p.count - begin); ++n) {
      const double e = __shfl_sync(kAll, mine, first + n);
      if (!(e < 0.0)) total += e;
    }
  }
  const double of_sink = largest == -INFINITY ? 0.0 : exp(static_cast<double>(sink) - largest);
  return {largest, of_sink, total + of_sink};
}

}  // namespace heddle::cuda::any::attention_merge

// One head's row on its way from a tensor to another, in pieces of kWidth elements (of pairs, where it is rotated).
// Each piece reads all it needs before it writes, and no other piece touches those elements: a row may be written over
// itself.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/rotary.cuh"
#include "problem/kv_cache.h"

namespace heddle::cuda::any::kv_cache {

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Piece {
  T element[kWidth];
};

// How a row is stored: in its own dtype, bit for bit where nothing was computed,
template <class T>
struct InKind {
  using Element = T;
  __device__ T keep(T x) const { return x; }
  __device__ T round(float x) const {
    if constexpr (sizeof(T) == 4) {
      return x;
    } else {
      return static_cast<T>(x);  // to nearest even
    }
  }
};

// or as e4m3, to nearest even and saturating, in units of `scale`.
template <class T>
struct InE4m3 {
  using Element = std::uint8_t;
  float scale;
  __device__ std::uint8_t keep(T x) const { return round(to_float(x)); }
  __device__ std::uint8_t round(float x) const {
    return __nv_cvt_float_to_fp8(__fdiv_rn(x, scale), __NV_SATFINITE, __NV_E4M3);
  }
};

// kWidth above 1: rows are contiguous, and every piece begins at a multiple of its size.
template <class T, int kWidth>
struct Row {
  T* data;
  std::int64_t stride;

  __device__ Row(const Operand& x, std::int64_t b, std::int64_t s, std::int64_t h)
      : data(reinterpret_cast<T*>(x.data) + (b * x.stride_b + s * x.stride_s + h * x.stride_h)), stride(x.stride_d) {}
  __device__ Piece<T, kWidth> load(int d) const {
    if constexpr (kWidth > 1) return *reinterpret_cast<const Piece<T, kWidth>*>(data + d);
    return {data[d * stride]};
  }
  __device__ void store(int d, const Piece<T, kWidth>& piece) const {
    if constexpr (kWidth > 1) {
      *reinterpret_cast<Piece<T, kWidth>*>(data + d) = piece;
    } else {
      data[d * stride] = piece.element[0];
    }
  }
};

template <int kWidth>
__device__ int pieces_of(std::int64_t head_size, std::int64_t rotated) {
  return static_cast<int>(head_size - rotated / 2) / kWidth;
}

// Piece n of pieces_of(): first those that are rotated, then those that pass through.
template <class T, class Kind, int kWidth>
__device__ void move_piece(const RotaryTables& tables, std::int64_t position, const Row<T, kWidth>& from,
                           const Row<typename Kind::Element, kWidth>& to, const Kind& kind, int n) {
  const int half = static_cast<int>(tables.dims / 2), pair = n * kWidth;
  Piece<typename Kind::Element, kWidth> out[2];
  if (pair >= half) {
    const Piece<T, kWidth> x = from.load(half + pair);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) out[0].element[i] = kind.keep(x.element[i]);
    to.store(half + pair, out[0]);
    return;
  }
  // Pairs stand side by side, or half a head apart.
  const int first = tables.interleaved ? 2 * pair : pair, second = tables.interleaved ? first + kWidth : half + pair;
  const Piece<T, kWidth> x = from.load(first), y = from.load(second);
  if (tables.interleaved) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // Elements 2 i and 2 i + 1 of both pieces together.
      const int one = 2 * i, other = 2 * i + 1;
      float a = to_float(one < kWidth ? x.element[one % kWidth] : y.element[one % kWidth]);
      float b = to_float(other < kWidth ? x.element[other % kWidth] : y.element[other % kWidth]);
      angle_at<T>(tables, position, pair + i).turn(a, b);
      out[one / kWidth].element[one % kWidth] = kind.round(a);
      out[other / kWidth].element[other % kWidth] = kind.round(b);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float a = to_float(x.element[i]), b = to_float(y.element[i]);
      angle_at<T>(tables, position, pair + i).turn(a, b);
      out[0].element[i] = kind.round(a);
      out[1].element[i] = kind.round(b);
    }
  }
  to.store(first, out[0]);
  to.store(second, out[1]);
}

}  // namespace heddle::cuda::any::kv_cache

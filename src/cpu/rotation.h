// Rows of heads that are copied, or rotated on the way.
#pragma once

#include <cstring>

#include "cpu/kernels.h"
#include "problem/rotary.h"

namespace heddle::cpu {

// Copies bits, so that NaN payloads survive.
inline void copy_row(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride,
                     DType dtype, std::int64_t count) {
  if (from == to && from_stride == to_stride) return;
  if (from_stride == 1 && to_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_of(dtype));
  } else if (dtype == DType::f32) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + 4 * i * to_stride, from + 4 * i * from_stride, 4);
  } else {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + 2 * i * to_stride, from + 2 * i * from_stride, 2);
  }
}

// One position's angles, shared by all heads.
class Rotation {
 public:
  Rotation(const RotaryTables& tables, std::int64_t position)
      : kernels_(kernels()), half_(tables.dims / 2), interleaved_(tables.interleaved) {
    const auto size = static_cast<std::int64_t>(size_of(tables.dtype));
    kernels_.load_row(tables.cos + position * tables.cos_row * size, tables.dtype, tables.cos_column, half_, half_,
                      cos_);
    kernels_.load_row(tables.sin + position * tables.sin_row * size, tables.dtype, tables.sin_column, half_, half_,
                      sin_);
  }

  // Rotates one head's row of `dims` elements, which may be written over itself; dimensions from R on are copied.
  void apply(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride, DType dtype,
             std::int64_t dims) const {
    float x[kMaxRotaryDims];
    const std::int64_t rotated = 2 * half_;
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    kernels_.load_row(from, dtype, from_stride, rotated, rotated, x);
    turn(x);
    kernels_.store_row(x, rotated, to, dtype, to_stride);
    copy_row(from + rotated * from_stride * size, from_stride, to + rotated * to_stride * size, to_stride, dtype,
             dims - rotated);
  }

  // Rotates a head's first R elements.
  void turn(float* x) const {
    const std::int64_t step = interleaved_ ? 2 : 1, second = interleaved_ ? 1 : half_;
    for (std::int64_t i = 0; i < half_; ++i) {
      const float a = x[i * step], b = x[i * step + second];
      x[i * step] = a * cos_[i] - b * sin_[i];
      x[i * step + second] = b * cos_[i] + a * sin_[i];
    }
  }

 private:
  const Kernels& kernels_;
  std::int64_t half_;
  bool interleaved_;
  float cos_[kMaxRotaryDims / 2], sin_[kMaxRotaryDims / 2];
};

}  // namespace heddle::cpu

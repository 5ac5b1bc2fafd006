// A matrix in a low-bit format, and plain weights, where they lie: views without a check.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/lowbit.h"
#include "heddle/tensor.h"

namespace heddle::lowbit {

// [N, K], in plain storage (docs/formats.md).
struct Matrix {
  Format format;
  std::int64_t N = 0, K = 0;
  std::int64_t group = 1;      // columns of a scale, at least 1: K for one scale a row
  std::int64_t groups = 1;     // scales of a row
  std::int64_t row_bytes = 0;  // of codes
  std::uint8_t* codes = nullptr;
  void* scales = nullptr;  // of format.scale, [N, groups]
  std::uint8_t* zeros = nullptr;
  float* global_scale = nullptr;
};

// Weights [N, K] as they lie.
struct Weights {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_n = 0, stride_k = 0;  // elements

  std::byte* at(std::int64_t n, std::int64_t k) const {
    return data + (n * stride_n + k * stride_k) * static_cast<std::int64_t>(size_of(dtype));
  }
};

}  // namespace heddle::lowbit

// The tables of a rotary embedding after the checks, as kernels get them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle {

constexpr std::int64_t kMaxRotaryDims = 256;

// cos and sin [positions, dims / 2], both of one dtype; strides in elements.
struct RotaryTables {
  const std::byte* cos = nullptr;
  const std::byte* sin = nullptr;
  DType dtype = DType::f32;
  std::int64_t cos_row = 0, cos_column = 0, sin_row = 0, sin_column = 0;
  std::int64_t positions = 0;
  std::int64_t dims = 0;  // R; 0: nothing is rotated
  bool interleaved = false;
};

}  // namespace heddle

// Descriptors that the tensor memory accelerator copies by.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle::cuda {

// A strided tensor, innermost dimension first; the first has stride 1 and `stride` starts with the second's (elements).
// Boxes of it land in shared memory with the 128-byte swizzle, so box[0] is at most 128 bytes; outside the tensor they
// are zero. The address and all strides must be multiples of 16 bytes. Throws RuntimeError if the driver refuses it.
template <std::size_t kRank>
struct TensorMapShape {
  std::array<std::int64_t, kRank> extent;
  std::array<std::int64_t, kRank - 1> stride;
  std::array<int, kRank> box;
  bool streamed = false;  // far more than the L2 cache holds, read once: fetched by 128 bytes, not by 256
};

CUtensorMap make_tensor_map(const void* data, DType dtype, const TensorMapShape<4>& shape);
CUtensorMap make_tensor_map(const void* data, DType dtype, const TensorMapShape<5>& shape);

}  // namespace heddle::cuda

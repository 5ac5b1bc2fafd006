// Elements of the problem's tensors, on the device.
#pragma once

#include "core/attention_problem.h"
#include "cuda/common/ptx.cuh"

namespace heddle::cuda::sm90::attention_decode {

__device__ inline float load_value(const std::byte* data, DType dtype, std::int64_t n) {
  switch (dtype) {
    case DType::bf16:
      return static_cast<float>(reinterpret_cast<const __nv_bfloat16*>(data)[n]);
    case DType::f16:
      return static_cast<float>(reinterpret_cast<const __half*>(data)[n]);
    case DType::f8e4m3:
      return ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(reinterpret_cast<const std::uint8_t*>(data)[n])).x;
    default:
      return reinterpret_cast<const float*>(data)[n];
  }
}

__device__ inline float load_value(const Plane& x, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return load_value(x.data, x.dtype, x.offset(b, h, i, j));
}

__device__ inline bool load_flag(const Plane& x, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return x.data[x.offset(b, h, i, j)] != std::byte{0};
}

}  // namespace heddle::cuda::sm90::attention_decode

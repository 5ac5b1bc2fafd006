// What the soak's own kernels share: elements of any dtype, and errors of the runtime.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "heddle/tensor.h"

namespace heddle::soak {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

__device__ inline double load(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[at];
    case DType::f16:
      return static_cast<double>(__half2float(static_cast<const __half*>(data)[at]));
    case DType::bf16:
      return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    case DType::i32:
      return static_cast<double>(static_cast<const int*>(data)[at]);
    default:
      return static_cast<double>(static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[at]));
  }
}

// Rounded to nearest.
__device__ inline void store(void* data, DType dtype, std::int64_t at, double x) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[at] = static_cast<float>(x);
      break;
    case DType::f16:
      static_cast<__half*>(data)[at] = __double2half(x);
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[at] = __double2bfloat16(x);
      break;
    default:
      static_cast<__nv_fp8_e4m3*>(data)[at] = __nv_fp8_e4m3(x);
  }
}

// For n in [0, count): `body`, by all threads of the grid.
template <class Body>
__device__ void for_each(std::int64_t count, const Body& body) {
  for (std::int64_t n = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * blockDim.x) {
    body(n);
  }
}

}  // namespace heddle::soak

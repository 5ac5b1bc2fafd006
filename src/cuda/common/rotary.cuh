// One pair of a rotary embedding. Products and sums are rounded one by one, as the CPU's are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "problem/rotary.h"

namespace heddle::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

struct Angle {
  float cos, sin;

  // Rotates (a, b).
  __device__ void turn(float& a, float& b) const {
    const float x = a, y = b;
    a = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
    b = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
  }
};

template <class T>
__device__ Angle load_angle(const RotaryTables& tables, std::int64_t position, int pair) {
  return {to_float(reinterpret_cast<const T*>(tables.cos)[position * tables.cos_row + pair * tables.cos_column]),
          to_float(reinterpret_cast<const T*>(tables.sin)[position * tables.sin_row + pair * tables.sin_column])};
}

// Of pair number `pair` at a position inside the tables, which are f32 or of the data's type T.
template <class T>
__device__ Angle angle_at(const RotaryTables& tables, std::int64_t position, int pair) {
  return tables.dtype == DType::f32 ? load_angle<float>(tables, position, pair) : load_angle<T>(tables, position, pair);
}

}  // namespace heddle::cuda

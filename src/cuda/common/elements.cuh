// CUDA's types for dtypes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "heddle/tensor.h"

namespace heddle::cuda {

template <DType kType>
struct ElementType;
template <>
struct ElementType<DType::f32> {
  using Type = float;
};
template <>
struct ElementType<DType::f16> {
  using Type = __half;
};
template <>
struct ElementType<DType::bf16> {
  using Type = __nv_bfloat16;
};

template <DType kType>
using ElementOf = typename ElementType<kType>::Type;

}  // namespace heddle::cuda

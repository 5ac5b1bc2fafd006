// The variants of the kernel (cuda/common/variants.h): one a dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/any/naive_attention/params.h"
#include "cuda/common/variants.h"

namespace heddle::cuda::any::naive_attention {

struct Row {
  std::string_view name;
};

// Of what is multiplied, and of o where it is not f32 beside that.
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr Row kVariants[] = {
    {.name = "naive"},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::any::naive_attention

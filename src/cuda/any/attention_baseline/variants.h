// The variants of the kernels (cuda/common/variants.h): one a dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/any/attention_baseline/params.h"
#include "cuda/common/variants.h"

namespace heddle::cuda::any::attention_baseline {

struct Row {
  std::string_view name;
};

// Of what is multiplied.
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr Row kVariants[] = {
    {.name = "baseline"},
};

// A row for a type, and how to start its kernels, one after the other.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::any::attention_baseline

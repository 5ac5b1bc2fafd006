// The variants of the kernels (cuda/common/variants.h), by the bytes of a row of codes.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/any/attention_int8_qk/params.h"
#include "cuda/common/variants.h"

namespace heddle::cuda::any::attention_int8_qk {

struct Row {
  std::string_view name;
  int pitch;  // bytes of a row of codes
};

// Of q and k.
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .pitch = 64},
    {.name = "d128", .pitch = 128},
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

// Those of that dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::any::attention_int8_qk

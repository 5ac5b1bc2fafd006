// The variants of the kernels (cuda/common/variants.h): a row the columns that rows have in shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/sparse_bwd/host.h"
#include "cuda/sm80/sparse_bwd/params.h"

namespace heddle::cuda::sm80::sparse_bwd {

struct Row {
  std::string_view name;
  int head;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .head = 64},
    {.name = "d128", .head = 128},
};

// A row for a type, and how to start it. csr: of lists by offsets.
struct Variant : Row {
  DType type;
  void (*launch)(Params params, const sparse::Csr& csr, const Plan& plan, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

constexpr const char* kOperation = "sparse_attention_backward";

}  // namespace heddle::cuda::sm80::sparse_bwd

// The variants of the kernels over lists (cuda/common/variants.h): a row the columns that rows have in shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/sparse_fwd/plan.h"
#include "cuda/common/variants.h"

namespace heddle::cuda::sm80::sparse_fwd {

using cuda::sparse_fwd::Plan;

struct Row {
  std::string_view name;
  int head;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .head = 64},
    {.name = "d128", .head = 128},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const SparseProblem& problem, const Plan& plan, void* memory, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm80::sparse_fwd

// The variants of the kernel (cuda/common/variants.h). A call gets the first that takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/nsa_step/params.h"

namespace heddle::cuda::sm90::nsa_step {

struct Row {
  std::string_view name;
  int head;            // columns that rows have in shared memory
  bool paged = false;  // over a cache in pages
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .head = 64},
    {.name = "d128", .head = kMostHead},
    {.name = "d64 paged", .head = 64, .paged = true},
    {.name = "d128 paged", .head = kMostHead, .paged = true},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, unsigned blocks, cudaStream_t stream);
  int (*clusters_at_once)(int size);  // on the current GPU
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::nsa_step

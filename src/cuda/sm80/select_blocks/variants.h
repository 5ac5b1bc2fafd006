// The variants of the kernel (cuda/common/variants.h): a row the columns that keys have in shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/select_blocks/params.h"

namespace heddle::cuda::sm80::select_blocks {

struct Row {
  std::string_view name;
  int head;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .head = 64},
    {.name = "d128", .head = 128},
    {.name = "d256", .head = 256},
};
constexpr int kMostHeadOfCopies = 128;

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, unsigned blocks, std::size_t shared_bytes, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm80::select_blocks

// The variants of the kernel (cuda/common/variants.h). A call gets the first that takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/select_blocks/params.h"

namespace heddle::cuda::sm90::select_blocks {

struct Row {
  std::string_view name;
  int head, halvings;  // columns that keys have in shared memory; as in Cut
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64 group 2", .head = 64, .halvings = 0},  // or of one head
    {.name = "d64 group 4", .head = 64, .halvings = 1},
    {.name = "d64 group 8", .head = 64, .halvings = 2},
    {.name = "d64 group 16", .head = 64, .halvings = 3},
    {.name = "d128 group 2", .head = 128, .halvings = 0},  // or of one head
    {.name = "d128 group 4", .head = 128, .halvings = 1},
    {.name = "d128 group 8", .head = 128, .halvings = 2},
    {.name = "d128 group 16", .head = 128, .halvings = 3},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::select_blocks

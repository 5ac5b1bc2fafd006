// The variants of the kernel (cuda/common/variants.h). A call gets the first that takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention_fwd_fp8/params.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

struct Tiles {
  int head;                   // the largest head size of q and k, and of v
  int stages;                 // of K, V and V^T
  bool token_scales = false;  // of k and v; else they belong to heads
};

struct Row {
  std::string_view name;
  Tiles tiles;
};

// Of the output.
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = {.head = 64, .stages = 3}},
    {.name = "d96", .tiles = {.head = 96, .stages = 3}},
    {.name = "d128", .tiles = {.head = 128, .stages = 3}},
    {.name = "d64 tokens", .tiles = {.head = 64, .stages = 3, .token_scales = true}},
    {.name = "d128 tokens", .tiles = {.head = 128, .stages = 3, .token_scales = true}},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  int consumers, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those for an output of that dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

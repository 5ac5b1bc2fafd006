// The variants of Hopper's dense forward whose walk is over lists (cuda/common/variants.h). A call gets the first that
// takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention_fwd/variants.h"

namespace heddle::cuda::sm90::sparse_tiles_fwd {

using attention_fwd::Params;
using attention_fwd::Tiles;

// A tile of keys is a block.
struct Row {
  std::string_view name;
  Tiles tiles;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = attention_fwd::kD64},
    {.name = "d64 blocks of 64",
     .tiles = {.head = 64, .keys = 64, .consumers = 2, .stages = 4, .q_in_registers = true}},
    {.name = "d128", .tiles = attention_fwd::kD128},
    {.name = "d128 blocks of 64",
     .tiles = {.head = 128, .keys = 64, .consumers = 2, .stages = 4, .q_in_registers = true}},
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

}  // namespace heddle::cuda::sm90::sparse_tiles_fwd

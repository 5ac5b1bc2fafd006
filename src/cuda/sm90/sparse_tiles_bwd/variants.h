// The variants of Hopper's dense backward whose walk is over lists (cuda/common/variants.h). A call gets the first that
// takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention_bwd/variants.h"

namespace heddle::cuda::sm90::sparse_tiles_bwd {

using attention_bwd::Params;
using attention_bwd::Tiles;

// A tile has 128 keys: a block, or two whose rows a warpgroup each takes.
struct Row {
  std::string_view name;
  Tiles tiles;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = {.head = 64, .rows = 128}},
    {.name = "d128", .tiles = {.head = 128, .rows = 64}},
};

// What stands in the dense variant's place.
template <DType kType, int kRow>
struct Instance {
  static attention_bwd::Variant variant();
};

}  // namespace heddle::cuda::sm90::sparse_tiles_bwd

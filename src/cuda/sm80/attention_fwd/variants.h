// The variants of the kernel (cuda/common/variants.h).
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/attention/params.h"

namespace heddle::cuda::sm80::attention_fwd {

using attention::Params;

struct Tiling {
  int warps;
  int groups;  // of 16 query rows, owned by one warp
  int tile_k;
  int blocks;          // on a multiprocessor, as registers allow
  int kept_steps = 0;  // of 16 dimensions of q that stay in registers, where there is room (16-bit operands)
};

// A row has a kernel for plain calls, and two for all options: with smaller tiles, which leave registers for them.
struct Tilings {
  Tiling plain;
  Tiling options = {};
};

struct Row {
  std::string_view name;
  int head;              // the largest head size of q and k, and of v
  int products = 1;      // of the tensor cores for one of elements. 3: float32 with its own precision
  bool int8_qk = false;  // Q K^T in 8 bits: for plain calls only
  Tilings tilings;
};

constexpr DType k16BitTypes[] = {DType::bf16, DType::f16};
constexpr Row k16BitVariants[] = {
    {.name = "d64",
     .head = 64,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 128, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 64, .blocks = 3}}},
    {.name = "d128",
     .head = 128,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 64, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 64, .blocks = 2}}},
    {.name = "d256",
     .head = 256,
     .tilings = {.plain = {.warps = 4, .groups = 1, .tile_k = 64, .blocks = 2, .kept_steps = 8},
                 .options = {.warps = 4, .groups = 1, .tile_k = 32, .blocks = 2}}},
    {.name = "int8 d64",
     .head = 64,
     .int8_qk = true,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 128, .blocks = 2}}},
    {.name = "int8 d128",
     .head = 128,
     .int8_qk = true,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 64, .blocks = 2}}},
};
constexpr DType kF32Types[] = {DType::f32};
constexpr Row kF32Variants[] = {
    {.name = "d64",
     .head = 64,
     .products = 3,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 64, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 32, .blocks = 3}}},
    {.name = "d128",
     .head = 128,
     .products = 3,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 32, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 32, .blocks = 3}}},
    {.name = "d256",
     .head = 256,
     .products = 3,
     .tilings = {.plain = {.warps = 4, .groups = 1, .tile_k = 16, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 16, .blocks = 2}}},
    {.name = "tf32 d64",
     .head = 64,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 64, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 64, .blocks = 3}}},
    {.name = "tf32 d128",
     .head = 128,
     .tilings = {.plain = {.warps = 4, .groups = 2, .tile_k = 32, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 32, .blocks = 3}}},
    {.name = "tf32 d256",
     .head = 256,
     .tilings = {.plain = {.warps = 4, .groups = 1, .tile_k = 16, .blocks = 2},
                 .options = {.warps = 4, .groups = 1, .tile_k = 16, .blocks = 2}}},
};

// One kernel: the query rows of its tile, and how to start it.
struct Variant {
  int tile_q;
  void (*launch)(const Params& params, cudaStream_t stream);
};

// A row for a type.
struct Variants : Row {
  DType type;
  Variant plain;    // scale > 0, rows of 16-byte pieces, none of the score options
  Variant options;  // any scale and all options, rows of 16-byte pieces
  Variant strided;  // everything
};

template <DType kType, int kRow>
struct Instance {
  static Variants variant();
};

// Those of that dtype, in the order of the table.
std::span<const Variants> variants(DType type);

}  // namespace heddle::cuda::sm80::attention_fwd

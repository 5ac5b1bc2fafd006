// The variants of the kernels (cuda/common/variants.h).
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/attention_bwd/params.h"

namespace heddle::cuda::sm80::attention_bwd {

struct Tiling {
  int warps, tile_q, tile_k;
  // How many warps share the rows of each matrix of sums; the others share its columns.
  int score_warps;  // S and dP [tile_q, tile_k]
  int key_warps;    // dK and dV [tile_k, head size]
  int row_warps;    // dQ [tile_q, head size]
  int blocks;       // on a multiprocessor, as registers allow
};

struct Tilings {
  Tiling large;       // of plain calls; may need the shared memory of Hopper
  Tiling plain;       // the same; may need more shared memory than Ada has
  Tiling options;     // of all calls: smaller, which leaves registers; may need as much
  Tiling everywhere;  // of all calls
};

struct Row {
  std::string_view name;
  int head;          // the largest head size of q and k, and of v
  int products = 1;  // of the tensor cores for one of elements. 3: float32 with its own precision
  Tilings tilings;
  bool one_kernel = false;  // with all options, for all calls
};

constexpr Tiling kD64{
    .warps = 4, .tile_q = 128, .tile_k = 64, .score_warps = 4, .key_warps = 2, .row_warps = 4, .blocks = 2};
constexpr Tiling kD64Options{
    .warps = 4, .tile_q = 64, .tile_k = 64, .score_warps = 2, .key_warps = 2, .row_warps = 2, .blocks = 2};
constexpr Tiling kD128{
    .warps = 4, .tile_q = 64, .tile_k = 64, .score_warps = 2, .key_warps = 2, .row_warps = 2, .blocks = 2};
constexpr Tiling kD128Options{
    .warps = 4, .tile_q = 32, .tile_k = 64, .score_warps = 2, .key_warps = 2, .row_warps = 2, .blocks = 2};
constexpr Tiling kD256Large{
    .warps = 8, .tile_q = 128, .tile_k = 64, .score_warps = 4, .key_warps = 2, .row_warps = 4, .blocks = 1};
constexpr Tiling kD256{
    .warps = 8, .tile_q = 64, .tile_k = 64, .score_warps = 4, .key_warps = 2, .row_warps = 2, .blocks = 1};
constexpr Tiling kD256Everywhere{
    .warps = 4, .tile_q = 32, .tile_k = 32, .score_warps = 2, .key_warps = 1, .row_warps = 1, .blocks = 2};
constexpr Tiling kF32D64{
    .warps = 4, .tile_q = 64, .tile_k = 64, .score_warps = 2, .key_warps = 2, .row_warps = 2, .blocks = 1};
constexpr Tiling kF32D128{
    .warps = 4, .tile_q = 32, .tile_k = 32, .score_warps = 2, .key_warps = 2, .row_warps = 2, .blocks = 2};
constexpr Tiling kF32D256{
    .warps = 4, .tile_q = 16, .tile_k = 16, .score_warps = 1, .key_warps = 1, .row_warps = 1, .blocks = 2};

constexpr Tilings one(const Tiling& tiling) { return {tiling, tiling, tiling, tiling}; }

constexpr DType k16BitTypes[] = {DType::bf16, DType::f16};
constexpr Row k16BitVariants[] = {
    {.name = "d64",
     .head = 64,
     .tilings = {.large = kD64, .plain = kD64, .options = kD64Options, .everywhere = kD64Options}},
    {.name = "d128",
     .head = 128,
     .tilings = {.large = kD128, .plain = kD128, .options = kD128Options, .everywhere = kD128Options}},
    {.name = "d256",
     .head = 256,
     .tilings = {.large = kD256Large, .plain = kD256, .options = kD256, .everywhere = kD256Everywhere}},
};
constexpr DType kF32Types[] = {DType::f32};
constexpr Row kF32Variants[] = {
    {.name = "d64", .head = 64, .products = 3, .tilings = one(kF32D64), .one_kernel = true},
    {.name = "d128", .head = 128, .products = 3, .tilings = one(kF32D128), .one_kernel = true},
    {.name = "d256", .head = 256, .products = 3, .tilings = one(kF32D256), .one_kernel = true},
    {.name = "tf32 d64", .head = 64, .tilings = one(kF32D64), .one_kernel = true},
    {.name = "tf32 d128", .head = 128, .tilings = one(kF32D128), .one_kernel = true},
    {.name = "tf32 d256", .head = 256, .tilings = one(kF32D256), .one_kernel = true},
};

// One tiling: its tiles, and how to start its kernels.
struct Variant {
  int tile_q, tile_k, head_size;
  std::size_t shared_bytes;
  void (*launch)(const Params& params, cudaStream_t stream);              // dk, dv or their sums, and the sums of dq
  void (*launch_finish_dq)(const Params& params, cudaStream_t stream);    // dq
  void (*launch_finish_keys)(const Params& params, cudaStream_t stream);  // dk and dv of splits
};

// A row for a type.
struct Variants : Row {
  DType type;
  Variant large, plain;                                             // none of the score options
  Variant options, everywhere;                                      // everything
  void (*launch_dbias)(const Params& params, cudaStream_t stream);  // by the tiles of `everywhere`
};

template <DType kType, int kRow>
struct Instance {
  static Variants variant();
};

// Those of that dtype, in the order of the table.
std::span<const Variants> variants(DType type);

}  // namespace heddle::cuda::sm80::attention_bwd

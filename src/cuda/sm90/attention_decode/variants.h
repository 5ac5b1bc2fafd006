// The variants of the kernel (cuda/common/variants.h). A call gets the first that takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention_decode/params.h"

namespace heddle::cuda::sm90::attention_decode {

struct Tiles {
  int head;                 // the largest head size
  int row_tiles = 1;        // of 16 rows, for each warp
  bool warpgroups = false;  // the four warps of a warpgroup multiply as one, and read K and V in shared memory once
  bool key_scales = false;  // of an e4m3 cache, which differ from key to key; else they belong to heads
};

struct Row {
  std::string_view name;
  Tiles tiles;
};

// By the elements of the cache.
constexpr DType k16BitTypes[] = {DType::bf16, DType::f16};
constexpr Row k16BitVariants[] = {
    {.name = "d64 warpgroup", .tiles = {.head = 64, .warpgroups = true}},
    {.name = "d64 wide", .tiles = {.head = 64, .row_tiles = 2}},
    {.name = "d64", .tiles = {.head = 64}},
    {.name = "d128 warpgroup", .tiles = {.head = 128, .warpgroups = true}},
    {.name = "d128 wide", .tiles = {.head = 128, .row_tiles = 2}},
    {.name = "d128", .tiles = {.head = 128}},
    {.name = "d256 warpgroup", .tiles = {.head = 256, .warpgroups = true}},
    {.name = "d256", .tiles = {.head = 256}},
};
constexpr DType kE4m3Types[] = {DType::f8e4m3};
constexpr Row kE4m3Variants[] = {
    {.name = "d64 wide", .tiles = {.head = 64, .row_tiles = 2}},
    {.name = "d64", .tiles = {.head = 64}},
    {.name = "d128 wide", .tiles = {.head = 128, .row_tiles = 2}},
    {.name = "d128", .tiles = {.head = 128}},
    {.name = "d256", .tiles = {.head = 256}},
    {.name = "d64 wide keys", .tiles = {.head = 64, .row_tiles = 2, .key_scales = true}},
    {.name = "d64 keys", .tiles = {.head = 64, .key_scales = true}},
    {.name = "d128 wide keys", .tiles = {.head = 128, .row_tiles = 2, .key_scales = true}},
    {.name = "d128 keys", .tiles = {.head = 128, .key_scales = true}},
    {.name = "d256 keys", .tiles = {.head = 256, .key_scales = true}},
};

// A row for a type, what else the host must know of it, and how to start it.
struct Variant : Row {
  DType type;
  int warps;   // that multiply as one, with neighbouring row tiles: 1, or a warpgroup's 4
  int keys;    // of such a product
  int panels;  // 128-byte wide parts of a key
  int panel_elements;
  int q_pitch, q_rows;  // bytes of a row of q in shared memory; rows of a head there are multiples of q_rows
  int control_bytes, merge_bytes;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
  // How many clusters of `size` CTAs, up to kMaxCluster, the current GPU holds at once.
  int (*clusters_at_once)(int size);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those for a cache of that dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::attention_decode

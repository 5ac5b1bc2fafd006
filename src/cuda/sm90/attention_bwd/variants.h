// The variants of the kernel (cuda/common/variants.h). A call gets the first that has its options and head size.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention_bwd/params.h"

namespace heddle::cuda::sm90::attention_bwd {

struct Tiles {
  int head;  // the largest head size of q and k, and of v
  int rows;  // of queries, in a tile
};

// What is done to scores pair by pair. kPlanes: ALiBi, bias, mask.
enum class Option { kNone, kSoftcap, kPlanes };

struct Row {
  std::string_view name;
  Tiles tiles;
  Option option = Option::kNone;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = {.head = 64, .rows = 128}},
    {.name = "d64 softcap", .tiles = {.head = 64, .rows = 128}, .option = Option::kSoftcap},
    {.name = "d64 planes", .tiles = {.head = 64, .rows = 128}, .option = Option::kPlanes},
    {.name = "d96", .tiles = {.head = 96, .rows = 64}},
    {.name = "d128", .tiles = {.head = 128, .rows = 64}},
    {.name = "d128 softcap", .tiles = {.head = 128, .rows = 64}, .option = Option::kSoftcap},
    {.name = "d128 planes", .tiles = {.head = 128, .rows = 64}, .option = Option::kPlanes},
    {.name = "d192", .tiles = {.head = 192, .rows = 64}},
    {.name = "d256", .tiles = {.head = 256, .rows = 64}},
    {.name = "d256 softcap", .tiles = {.head = 256, .rows = 64}, .option = Option::kSoftcap},
    {.name = "d256 planes", .tiles = {.head = 256, .rows = 64}, .option = Option::kPlanes},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  int columns;  // of its sums: the largest head size that it takes, or a little more
  int tile_q, tile_k;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
  void (*round)(const Params& params, const Sums& sums, cudaStream_t stream);  // after that, on the same stream
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those of q's dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::attention_bwd

// The variants of the kernels (cuda/common/variants.h). A call gets the first that has its cache and head size.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/attention_decode/params.h"

namespace heddle::cuda::sm80::attention_decode {

struct Tiles {
  int head;    // the larger of D and Dv, rounded up
  int warps;   // of a CTA
  int stages;  // steps of a warp that are in shared memory or on their way
  int blocks;  // CTAs on a multiprocessor, as registers allow
};

enum class Cache { kLikeQ, kE4m3, kInt4 };

struct Row {
  std::string_view name;
  Tiles tiles;
  Cache cache = Cache::kLikeQ;
};

// Of q.
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = {.head = 64, .warps = 4, .stages = 4, .blocks = 2}},
    {.name = "d128", .tiles = {.head = 128, .warps = 4, .stages = 3, .blocks = 2}},
    {.name = "d256", .tiles = {.head = 256, .warps = 2, .stages = 2, .blocks = 2}},
    {.name = "e4m3 d128", .tiles = {.head = 128, .warps = 4, .stages = 4, .blocks = 2}, .cache = Cache::kE4m3},
    {.name = "e4m3 d256", .tiles = {.head = 256, .warps = 2, .stages = 4, .blocks = 2}, .cache = Cache::kE4m3},
    // Stages are large: two of a warp are as many bytes under way as three of 16-bit keys.
    {.name = "int4 d64", .tiles = {.head = 64, .warps = 4, .stages = 2, .blocks = 3}, .cache = Cache::kInt4},
    {.name = "int4 d128", .tiles = {.head = 128, .warps = 4, .stages = 2, .blocks = 2}, .cache = Cache::kInt4},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  int shared_bytes;
  void (*launch)(const Params& params, unsigned ctas, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those of q's dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm80::attention_decode

// The variants of the kernel (cuda/common/variants.h): a row a source of weights, with tiles for few rows of W and for
// many.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm80/linear_gemv/params.h"

namespace heddle::cuda::sm80::linear_gemv {

struct Tiles {
  int slabs;   // of 16 rows of W, of a CTA
  int groups;  // warps of a slab, which take turns along K
};

struct Pair {
  Tiles few, many;
};

struct Row {
  std::string_view name;
  Pair tiles;
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "e2m1", .tiles = {.few = {.slabs = 1, .groups = 8}, .many = {.slabs = 2, .groups = 4}}},
};

// One kernel, and how to start it.
struct Variant {
  int slabs, resident, block_columns;
  int fixed_bytes;  // of shared memory
  void (*launch)(const Params& params, std::size_t shared_bytes, cudaStream_t stream);
};

// A row for a type.
struct Variants : Row {
  DType type;
  Variant few, many;
};

template <DType kType, int kRow>
struct Instance {
  static Variants variant();
};

// Those of x's dtype, in the order of the table.
std::span<const Variants> variants(DType type);

}  // namespace heddle::cuda::sm80::linear_gemv

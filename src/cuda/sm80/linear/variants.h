// The variants of the kernel (cuda/common/variants.h): a row a decoder of weights, with tiles for few tokens and for
// many.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/any/linear/plan.h"
#include "cuda/common/variants.h"
#include "cuda/sm80/linear/params.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::TileShape;

struct Tiles {
  int tokens;         // rows of x, the N of the products
  int row_groups;     // of four warps, with rows of W of their own
  int column_groups;  // those that have the same rows and take turns along K
  int row_blocks;     // of 64 rows of W, of a group
};

constexpr Tiles kFew{.tokens = 16, .row_groups = 1, .column_groups = 4, .row_blocks = 1};
constexpr Tiles kMany{.tokens = 64, .row_groups = 2, .column_groups = 1, .row_blocks = 2};

// In the order of the costs in candidate.cc.
enum class Decoder { kE2M1, kInt4, kInt8, kE4M3, kLookup };

struct Row {
  std::string_view name;
  Decoder decoder;
  double few_unit, many_unit;  // seconds of a unit of a CTA, all of them busy, as measured on an H200
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "e2m1", .decoder = Decoder::kE2M1, .few_unit = 0.90e-6, .many_unit = 1.77e-6},
    {.name = "int4", .decoder = Decoder::kInt4, .few_unit = 0.95e-6, .many_unit = 1.96e-6},
    {.name = "int8", .decoder = Decoder::kInt8, .few_unit = 0.60e-6, .many_unit = 1.05e-6},
    {.name = "e4m3", .decoder = Decoder::kE4M3, .few_unit = 0.61e-6, .many_unit = 1.07e-6},
    {.name = "lookup", .decoder = Decoder::kLookup, .few_unit = 1.08e-6, .many_unit = 2.12e-6},
};

// One kernel: its tiles, and how to start it.
struct Variant {
  TileShape tile;
  int fixed_bytes, stage_bytes;  // of shared memory
  bool table;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
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

// Of shared memory.
constexpr int table_bytes(int lookup_copies) { return 256 * lookup_copies * 4; }
constexpr int shared_bytes(const Variant& v, int stages, int lookup_copies) {
  return v.fixed_bytes + stages * v.stage_bytes + (v.table ? table_bytes(lookup_copies) : 0);
}

// Those of x's dtype, in the order of the table.
std::span<const Variants> variants(DType type);

}  // namespace heddle::cuda::sm80::linear

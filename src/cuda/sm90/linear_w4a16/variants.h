// The variants of the kernel (cuda/common/variants.h). A call gets the quickest by what was measured of each.
#pragma once

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear_w4a16 {

struct Tiles {
  bool warpgroups;     // they multiply by wgmma, and have 64 rows of W each; else warps by mma.sync
  int tokens;          // rows of x, the N of the products
  int row_groups;      // warpgroups with rows of W of their own, the M
  int column_groups;   // those that have the same rows and take turns along K
  int row_blocks = 1;  // of 64 rows, of a warpgroup
};

struct Row {
  std::string_view name;  // tokens, then warpgroups along the rows where there are several choices
  Tiles tiles;
  double unit;             // seconds of a unit of a CTA, all of them busy, as measured on an H200
  bool invariant = false;  // the one to take where the order of sums must not depend on the rows of x
};

constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "t8", .tiles = {.warpgroups = false, .tokens = 8, .row_groups = 1, .column_groups = 4}, .unit = 0.66e-6},
    {.name = "t16", .tiles = {.warpgroups = false, .tokens = 16, .row_groups = 1, .column_groups = 4}, .unit = 0.70e-6},
    {.name = "t32", .tiles = {.warpgroups = false, .tokens = 32, .row_groups = 1, .column_groups = 4}, .unit = 0.86e-6},
    {.name = "t32r2",
     .tiles = {.warpgroups = true, .tokens = 32, .row_groups = 2, .column_groups = 2},
     .unit = 0.82e-6},
    {.name = "t64",
     .tiles = {.warpgroups = true, .tokens = 64, .row_groups = 4, .column_groups = 1},
     .unit = 1.08e-6,
     .invariant = true},
    {.name = "t64r2",
     .tiles = {.warpgroups = true, .tokens = 64, .row_groups = 2, .column_groups = 1},
     .unit = 0.56e-6},
    {.name = "t128r2",
     .tiles = {.warpgroups = true, .tokens = 128, .row_groups = 2, .column_groups = 1},
     .unit = 0.72e-6},
    {.name = "t128r3",
     .tiles = {.warpgroups = true, .tokens = 128, .row_groups = 3, .column_groups = 1},
     .unit = 1.15e-6},
    {.name = "t256",
     .tiles = {.warpgroups = true, .tokens = 256, .row_groups = 2, .column_groups = 1},
     .unit = 1.40e-6},
};

// A row for a type, and how to start it.
struct Variant : Row, linear::Variant<lowbit::FragmentBlock> {
  DType type;
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those of x's dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::linear_w4a16

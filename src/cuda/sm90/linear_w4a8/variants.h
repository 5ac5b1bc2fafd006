// The variants of the kernel (cuda/common/variants.h). A call gets the quickest by what was measured of each.
#pragma once

#include <span>
#include <string_view>
#include <type_traits>

#include "cuda/common/variants.h"
#include "cuda/sm90/linear/launch.h"

namespace heddle::cuda::sm90::linear_w4a8 {

using lowbit::FragmentBlock8;  // of mxfp4 and e2m1_row
using lowbit::ScaledBlock8;    // of nvfp4

struct Tiles {
  int tokens;      // rows of x, the N of the products
  int row_groups;  // warpgroups of 64 rows of W, the M
  int decoders;    // warps that decode weights for them; 0: each decodes its own in registers
};

struct Row {
  std::string_view name;  // tokens, then warpgroups where there are several choices
  Tiles tiles;
  double unit;             // seconds of a unit of a CTA, all of them busy, as measured on an H200
  bool invariant = false;  // the one to take where the order of sums must not depend on the rows of x
};

// Of y. Each row for both kinds of blocks.
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "t64", .tiles = {.tokens = 64, .row_groups = 4, .decoders = 0}, .unit = 0.95e-6, .invariant = true},
    {.name = "t64r2", .tiles = {.tokens = 64, .row_groups = 2, .decoders = 0}, .unit = 0.49e-6},
    {.name = "t128", .tiles = {.tokens = 128, .row_groups = 2, .decoders = 0}, .unit = 0.60e-6},
    {.name = "t256", .tiles = {.tokens = 256, .row_groups = 2, .decoders = 7}, .unit = 1.00e-6},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  linear::Variant<FragmentBlock8> fragment;
  linear::Variant<ScaledBlock8> scaled;

  template <class Block>
  const linear::Variant<Block>& of() const {
    if constexpr (std::is_same_v<Block, ScaledBlock8>) {
      return scaled;
    } else {
      return fragment;
    }
  }
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those for y of that dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::linear_w4a8

// The variants of the kernel (cuda/common/variants.h). A call gets the first that takes it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string_view>

#include "cuda/common/variants.h"
#include "cuda/sm90/attention/params.h"
#include "cuda/sm90/attention/tiles.h"

namespace heddle::cuda::sm90::attention_fwd {

using attention::kRows;
using attention::Params;
using attention::PlaneAccess;
using attention::ScorePlane;
using attention::Softcap;

// What a kernel can do to scores. Kernels are compiled for few combinations: each option makes the loop over keys
// longer, which is too long for the instruction caches already, and a jump over an option that is not used costs about
// 80 cycles.
enum ScoreOption : unsigned {
  kSoftcap = 1,
  kAlibi = 2,
  kKeyPlanes = 4,   // bias or mask by PlaneAccess::keys
  kTilePlanes = 8,  // by PlaneAccess::copies
  kAnyPlanes = 16,  // by PlaneAccess::direct; also scales that are not positive
  kAllOptions = 31,
  // In kernels of their own:
  kKeyTerms = 32,    // bias or mask by PlaneAccess::keys, as columns of the product
  kAlibiTerms = 64,  // ALiBi, likewise
  kBulkPlane = 128,  // bias or mask by PlaneAccess::bulk
  kPieces = 256,     // nothing but a band about q_offset, key_offset, q_step and key_step
};

struct Tiles {
  int head;             // the largest head size of q and k, and of v
  int keys;             // of a tile
  int consumers;        // warpgroups of 64 query rows
  int stages;           // of K and of V
  bool q_in_registers;  // else wgmma reads q from shared memory for every key tile

  // Bias and mask tiles by PlaneAccess::copies that shared memory has a place for. 2: one of each.
  constexpr int planes() const { return head <= 128 ? 2 : 1; }
};

struct Row {
  std::string_view name;
  Tiles tiles;
  unsigned options = 0;      // of ScoreOption
  bool short_calls = false;  // only for those whose rows meet few keys, or that have few rows
};

constexpr Tiles kD64{.head = 64, .keys = 128, .consumers = 2, .stages = 2, .q_in_registers = true};
constexpr Tiles kD64Wide{.head = 64, .keys = 128, .consumers = 3, .stages = 2, .q_in_registers = false};
constexpr Tiles kD96{.head = 96, .keys = 128, .consumers = 2, .stages = 2, .q_in_registers = true};
constexpr Tiles kD128{.head = 128, .keys = 128, .consumers = 2, .stages = 2, .q_in_registers = true};
constexpr Tiles kD128SharedQ{.head = 128, .keys = 128, .consumers = 2, .stages = 2, .q_in_registers = false};
constexpr Tiles kD192{.head = 192, .keys = 96, .consumers = 2, .stages = 2, .q_in_registers = false};
constexpr Tiles kD256{.head = 256, .keys = 64, .consumers = 2, .stages = 2, .q_in_registers = false};

// "keys": ALiBi, bias and mask by keys. "planes": bias or mask with rows where they come in bulk. "options":
// everything, slower. "pieces": of a longer problem, without score options.
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr Row kVariants[] = {
    {.name = "d64", .tiles = kD64, .short_calls = true},
    {.name = "d64 wide", .tiles = kD64Wide},
    {.name = "d96", .tiles = kD96},
    {.name = "d128", .tiles = kD128},
    {.name = "d192", .tiles = kD192},
    {.name = "d256", .tiles = kD256},
    {.name = "d64 pieces", .tiles = kD64, .options = kPieces},
    {.name = "d128 pieces", .tiles = kD128, .options = kPieces},
    {.name = "d64 softcap", .tiles = kD64Wide, .options = kSoftcap},
    {.name = "d64 keys", .tiles = kD64Wide, .options = kKeyTerms | kAlibiTerms},
    {.name = "d64 planes", .tiles = kD64Wide, .options = kBulkPlane},
    {.name = "d64 options", .tiles = kD64, .options = kAllOptions},
    {.name = "d128 softcap", .tiles = kD128SharedQ, .options = kSoftcap},
    {.name = "d128 keys", .tiles = kD128, .options = kKeyTerms | kAlibiTerms},
    {.name = "d128 planes", .tiles = kD128, .options = kBulkPlane},
    {.name = "d128 options", .tiles = kD128SharedQ, .options = kAllOptions},
    {.name = "d256 softcap", .tiles = kD256, .options = kSoftcap},
    {.name = "d256 alibi", .tiles = kD256, .options = kAlibi},
    {.name = "d256 planes", .tiles = kD256, .options = kKeyPlanes | kTilePlanes},
    {.name = "d256 options", .tiles = kD256, .options = kAllOptions},
};

// A row for a type, and how to start it.
struct Variant : Row {
  DType type;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

template <DType kType, int kRow>
struct Instance {
  static Variant variant();
};

// Those of q's dtype, in the order of the table.
std::span<const Variant> variants(DType type);

}  // namespace heddle::cuda::sm90::attention_fwd

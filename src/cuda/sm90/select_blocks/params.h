// What the choice of blocks on Hopper is told, and how its threads and positions are cut.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/sparse/listing.h"
#include "cuda/common/sparse/place.h"
#include "problem/select_blocks.h"

namespace heddle::cuda::sm90::select_blocks {

constexpr int kWarpgroup = 128, kConsumers = 2, kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kWarpRows = 16;   // of q: heads times positions
constexpr int kTileKeys = 128;  // pooled keys at a time
constexpr int kMostSlots = 32;  // one a lane
constexpr int kMostGroup = 16;  // so that a warp has all rows of its positions
constexpr int kMostHead = 128;
constexpr int kMostPositions = kWarpRows / 2 * kConsumerWarps;  // of a CTA

// How the rows of a group lie in a warp: row r is head r % (G / 2) + G / 2 (r / 8) of the warp's position
// r % 8 / (G / 2), so that the two rows of a lane are heads of one position. A group of 1 has the rows of one of 2, of
// which the second is not there.
struct Cut {
  int halvings;  // of a tile's columns, while sums of heads are formed over lanes: log2(G / 2)

  constexpr int lanes() const { return 4 << halvings; }    // that have sums of one position
  constexpr int values() const { return 32 >> halvings; }  // sums of a tile that a lane has
  constexpr int of_warp() const { return 8 >> halvings; }  // positions
  constexpr int of_cta() const { return of_warp() * kConsumerWarps; }
};

struct Params {
  SelectProblem problem;
  // Pooled keys [B, Sk, Hkv, D], innermost first: D, Sk, Hkv, B. Packed sequences: B = 1, Sk is the total.
  CUtensorMap k;
  std::int64_t q_row, q_head, q_half;  // bytes from row to row, from head to head, and to the second half of a group
  int tiles, items;                    // of positions, of a kv head and of all
  float scale_log2;
};

// A CTA's positions of an item.
struct Work {
  sparse::Place at;  // the first
  // Of the first position, and there of the group's first head.
  const std::byte* q;
  const float* lse;
  std::int32_t* list;
  int kv_head;
  int tiles;  // of pooled keys, one at least; 0: there is no more work
  int count;  // of positions
  sparse::Listing positions[kMostPositions];
};

}  // namespace heddle::cuda::sm90::select_blocks

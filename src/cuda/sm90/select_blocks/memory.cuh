// Shared memory of the choice of blocks.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/sparse/best_blocks.cuh"
#include "cuda/common/sparse/tile.cuh"
#include "cuda/sm90/select_blocks/params.h"

namespace heddle::cuda::sm90::select_blocks {

using sparse::kAll;
using sparse::Key;
using sparse::kWarp;

template <class T, int kHead, int kHalvings>
struct Config {
  using Element = T;
  static constexpr int kHeadSize = kHead;
  static constexpr Cut kCut{kHalvings};
  static constexpr int kStages = kHead == 64 ? 6 : 4;
};

// Items are announced two ahead: a warp brings its rows of the next while it multiplies those of this one.
constexpr int kWorkSlots = 4;

template <class C>
struct SharedMemory {
  using Keys = sparse::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  using Rows = sparse::Tile<typename C::Element, kWarpRows, C::kHeadSize>;

  Keys k[C::kStages];
  Rows q[kConsumerWarps];
  float lse[kConsumerWarps][kWarpRows];
  // Of each position: its best blocks, the best first and zeros behind them, and those that may come among them.
  Key kept[kMostPositions][kWarp], waiting[kMostPositions][kWarp];
  unsigned cells[kConsumerWarps][kWarp];
  Work work[kWorkSlots];
  ptx::Barrier ready[C::kStages], free[C::kStages];
  ptx::Barrier work_ready[kWorkSlots], work_free[kWorkSlots];
};

__device__ __forceinline__ int lane_of_thread() { return static_cast<int>(threadIdx.x) % kWarp; }
// Of the consumers' warps.
__device__ __forceinline__ int consumer_warp() { return (static_cast<int>(threadIdx.x) - kWarpgroup) / kWarp; }

}  // namespace heddle::cuda::sm90::select_blocks

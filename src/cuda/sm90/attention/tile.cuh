// Tiles in shared memory as wgmma and the tensor memory accelerator take them.
#pragma once

#include <cstdint>

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/attention/tiles.h"

namespace heddle::cuda::sm90::attention {

// A [rows, columns] tile in panels of 64 columns.
template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr int kPanels = (kColumns + kPanel - 1) / kPanel;
  static constexpr std::uint32_t kPanelBytes = kRows * kPanel * sizeof(T);
  T panel[kPanels][kRows][kPanel];
};

// Box after box of 64 columns; their bytes count at `ready`. One thread.
template <class Tile>
__device__ __forceinline__ void load_panels(Tile& tile, const CUtensorMap& map, ptx::Barrier& ready, int row, int h,
                                            int b, ptx::L2 hint) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::tma_load_4d(tile.panel[panel], map, ready, panel * kPanel, row, h, b, hint);
  }
}

// Rows [from, to) become zeros, by `threads` threads of which this is number `thread`.
template <class Tile>
__device__ void clear_rows(Tile& tile, int from, int to, int thread, int threads) {
  constexpr int kChunks = sizeof(tile.panel[0][0]) / sizeof(uint4);
#pragma unroll 1
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    auto* chunks = reinterpret_cast<uint4*>(tile.panel[panel]);
#pragma unroll 1
    for (int i = from * kChunks + thread; i < to * kChunks; i += threads) chunks[i] = make_uint4(0, 0, 0, 0);
  }
}

// The same by a whole warp.
template <class Tile>
__device__ void clear_rows(Tile& tile, int from, int to) {
  clear_rows(tile, from, to, static_cast<int>(threadIdx.x) % 32, 32);
}

}  // namespace heddle::cuda::sm90::attention

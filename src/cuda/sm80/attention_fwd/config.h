// Tiles and shared memory of the forward for Ampere and Ada.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/any/attention_int8_qk/layout.h"
#include "cuda/sm80/attention/rows.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/attention/work.cuh"
#include "cuda/sm80/attention_fwd/variants.h"
#include "problem/key_walk.h"

namespace heddle::cuda::sm80::attention_fwd {

using attention::AlignedRows;
using attention::Float32;
using attention::kGroupRows;
using attention::recomputed_by_tile;
using attention::StridedRows;
using attention::swizzled;
using attention::Tile;
using attention::Work;

// kProducts: 3 for float32 with its own precision (products_tf32.cuh). QkElement: of q and k as they are multiplied; T,
// or int8 (products_int8.cuh). Rows: how they come to shared memory (attention/rows.cuh). Walk: which tiles of keys a
// tile of rows goes through.
template <class T, int kProducts_, int kHeadSize_, Tiling kTiling, bool kScoreOptions_, class Rows_,
          class QkElement_ = T, TileWalk Walk_ = BandWalk<int>>
struct Config {
  using Walk = Walk_;
  using Element = T;
  using QkElement = QkElement_;
  using Rows = Rows_;
  static constexpr int kProducts = kProducts_;
  static constexpr int kHeadSize = kHeadSize_;  // the larger of D and Dv, rounded up
  static constexpr int kThreads = 32 * kTiling.warps, kGroups = kTiling.groups, kBlocks = kTiling.blocks;
  static constexpr int kTileQ = kTiling.warps * kGroups * kGroupRows, kTileK = kTiling.tile_k;
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, bias, mask, dropout, any scale
  static constexpr int kKeptSteps = kTiling.kept_steps;
  // Bytes of a row in shared memory: of v and o, of q and k.
  static constexpr std::uint32_t kPitch = kHeadSize * sizeof(T), kQkPitch = kHeadSize * sizeof(QkElement);
};

template <class C>
concept Int8Qk = std::is_same_v<typename C::QkElement, std::int8_t>;

// The same with the tiles of keys that the tile of rows goes through.
template <class Walk>
struct TileWork : Work {
  Walk walk;
  // Of a piece of a longer problem: column of bias and mask that key 0 has, and what `off` lacks of row 0's distance
  // from key 0 where that is far.
  int key_offset, far;
};

// Scales of the codes of a tile: of its rows, and of its keys' groups.
template <int kTileQ, int kTileK>
struct Int8Scales {
  static constexpr int kBlocks = kTileK / any::attention_int8_qk::kBlockKeys;
  alignas(16) float q[kTileQ];
  alignas(16) any::attention_int8_qk::KeyGroup k[kBlocks][any::attention_int8_qk::kGroups];
};
struct NoScales {};

template <class C>
struct SharedMemory {
  // At the end, 16-bit rows of O on their way out, which 8-bit rows leave to share the space of k and v too.
  Tile<typename C::QkElement, C::kTileQ, C::kHeadSize> q;
  Tile<typename C::QkElement, C::kTileK, C::kHeadSize> k;
  Tile<typename C::Element, C::kTileK, C::kHeadSize> v;
  TileWork<typename C::Walk> work;  // here rather than in registers, which the products need
  std::conditional_t<Int8Qk<C>, Int8Scales<C::kTileQ, C::kTileK>, NoScales> scales;
};

}  // namespace heddle::cuda::sm80::attention_fwd

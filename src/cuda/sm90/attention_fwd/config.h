// Tiles, stages and shared memory of the Hopper forward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/tile.cuh"
#include "cuda/sm90/attention/work.cuh"
#include "cuda/sm90/attention_fwd/variants.h"
#include "problem/key_walk.h"

namespace heddle::cuda::sm90::attention_fwd {

using attention::kNoMoreTiles;
using attention::kPanel;
using attention::kPause;
using attention::kWorkSlots;
using attention::Tile;
using attention::TileWork;
using attention::Work;

// Walk: which tiles of keys a tile of rows goes through.
template <class T, Tiles kTiles, unsigned kOptions_, TileWalk Walk_ = BandWalk<int>>
struct Config {
  using Element = T;
  using Walk = Walk_;
  static constexpr int kHeadSize = kTiles.head, kValueSize = kTiles.head;
  static constexpr int kConsumers = kTiles.consumers;  // warpgroups of kRows query rows
  static constexpr int kTileK = kTiles.keys;
  static constexpr int kStages = kTiles.stages;
  static constexpr bool kQInRegisters = kTiles.q_in_registers;
  static constexpr bool kIsPiece = (kOptions_ & kPieces) != 0;
  static constexpr unsigned kOptions = kOptions_ & ~kPieces;  // of ScoreOption, for scores
  static constexpr bool kRemovesPairs =
      (kOptions & (kKeyPlanes | kTilePlanes | kAnyPlanes | kKeyTerms | kBulkPlane)) != 0;
  static constexpr bool kByElement = (kOptions & kAllOptions) != 0;  // what ScoreOptions does
  static constexpr bool kHasKeyTerms = (kOptions & kKeyTerms) != 0;
  static constexpr bool kHasAlibiTerms = (kOptions & kAlibiTerms) != 0;
  static constexpr bool kHasTerms = kHasKeyTerms || kHasAlibiTerms;
  static constexpr bool kHasBulkPlane = (kOptions & kBulkPlane) != 0;
  static constexpr bool kRepeatsTiles = kRemovesPairs;  // spoiled tiles are computed again
  static constexpr bool kGuessesMaxima = false;         // of rows, instead of looking for them
  // Bias and mask tiles that shared memory has a place for (2: one of each), and stages of each.
  static constexpr int kPlanes = kTiles.planes();
  static constexpr int kPlaneStages = kHeadSize <= 64 ? 2 : 1;
  // Whether two warpgroups issue their products in turn. Where a softmax takes longer than the other warpgroup's
  // products, they would else fall into step, and the tensor cores would wait for both.
  static constexpr bool kTakesTurns =
      kConsumers == 2 && kHeadSize == 128 && (kOptions == kSoftcap || kOptions == kBulkPlane);
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 3                                 ? 32
                                            : kRemovesPairs && !kHasTerms && !kHasBulkPlane ? 56
                                                                                            : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3                                 ? 160
                                            : kRemovesPairs && !kHasTerms && !kHasBulkPlane ? 224
                                                                                            : 232;
};

// Bias and mask of a consumer warp's 16 rows and a key tile. 16-byte chunk c of a row lies at chunk c ^ (row % 8), in
// rows of 64 bytes at c ^ (row / 2 % 4).
template <class C>
struct alignas(128) PlaneTiles {
  static constexpr int kRowsOfWarp = 16;
  std::byte bytes[C::kPlaneStages * kRowsOfWarp * C::kTileK * (C::kPlanes + 1)];

  // 16-bit elements, and mask bytes: behind the bias if both have a place.
  __device__ std::byte* bias(int stage) { return bytes + stage * (kRowsOfWarp * C::kTileK * 2); }
  __device__ std::byte* mask(int stage) {
    constexpr int kBegin = C::kPlanes == 2 ? C::kPlaneStages * kRowsOfWarp * C::kTileK * 2 : 0;
    return bytes + kBegin + stage * (kRowsOfWarp * C::kTileK);
  }
};

// Columns of k for what is added to scores key by key: a step of the product more. See terms.cuh. Core matrices of 8
// keys and 8 columns, 128 bytes each.
template <class C>
struct alignas(128) KeyTerms {
  typename C::Element columns[2][C::kTileK][8];
};

// The columns of q beside them; with ALiBi for keys left of the rows, on both sides, and right.
template <class C>
struct alignas(128) RowTerms {
  typename C::Element columns[C::kHasAlibiTerms ? 3 : 1][2][kRows][8];
  float slope[C::kHasAlibiTerms ? kRows : 1];  // in units of logits
};

// Bias or mask of a warpgroup's rows and a key tile, as the tensor memory accelerator brings it: panels of 64 elements
// of a bias, or of 128 bytes of a mask, with the 128-byte swizzle.
template <class C>
struct alignas(1024) BulkTile {
  std::byte bytes[kRows * C::kTileK * 2];
};

constexpr int kKeyTiles = 4;  // for which what the guard has written down is kept

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, kRows, C::kHeadSize> q[C::kConsumers];
  Tile<T, C::kTileK, C::kHeadSize> k[C::kStages];
  Tile<T, C::kTileK, C::kValueSize> v[C::kStages];
  T o[4 * C::kConsumers][16][kPanel];  // a warp's rows of O on their way out, one panel at a time
  TileWork<typename C::Walk> work[kWorkSlots];
  ptx::Barrier work_ready[kWorkSlots], work_free[kWorkSlots];
  ptx::Barrier q_ready[C::kConsumers], q_free[C::kConsumers];
  ptx::Barrier k_ready[C::kStages], k_free[C::kStages];
  ptx::Barrier v_ready[C::kStages], v_free[C::kStages], v_landed[C::kStages];
  std::uint32_t v_phase[C::kStages];  // the phase of v_landed that the guard waits for next: it has few registers
  struct Nothing {};
  std::conditional_t<(C::kOptions & kTilePlanes) != 0, PlaneTiles<C>, Nothing> planes[4 * C::kConsumers];
  std::conditional_t<C::kHasBulkPlane, BulkTile<C>, Nothing> bulk[C::kConsumers][C::kPlaneStages];
  ptx::Barrier bulk_ready[C::kConsumers][C::kPlaneStages], bulk_free[C::kConsumers][C::kPlaneStages];
  std::conditional_t<C::kHasTerms, KeyTerms<C>, Nothing> key_terms[kKeyTiles];
  std::conditional_t<C::kHasTerms, RowTerms<C>, Nothing> row_terms[C::kHasAlibiTerms ? C::kConsumers : 1];
  // Which keys of a tile are closed, removed for all rows by a bias or mask: of key 8 j + 2 a + c, bit 2 j + c of word
  // a.
  std::uint32_t closed_keys[kKeyTiles][4];
  ptx::Barrier work_ending;  // the producer of keys, to the scheduler: few keys are left of a tile
  attention::PackedPlace packed_place;
};

}  // namespace heddle::cuda::sm90::attention_fwd

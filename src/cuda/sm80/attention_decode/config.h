// Tiles, pipeline and shared memory of decode attention for Ampere and Ada.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/sm80/attention_decode/tiles.h"
#include "cuda/sm80/attention_decode/variants.h"

namespace heddle::cuda::sm80::attention_decode {

// Stored_: of the cache. std::uint8_t stands for e4m3.
template <class T, class Stored_, Tiles kTiles>
struct Config {
  using Element = T;
  using Stored = Stored_;
  static constexpr bool kE4m3 = sizeof(Stored) == 1;
  static constexpr bool kInt4 = false;  // see int4_config.h
  static constexpr int kHeadSize = kTiles.head;
  static constexpr int kWarps = kTiles.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kTiles.stages;
  static constexpr int kBlocks = kTiles.blocks;
  // Elements in 16 bytes, which a lane copies at once. A quad of lanes covers 4 pieces of a key, eight lanes 8 pieces
  // of a value.
  static constexpr int kPiece = 16 / sizeof(Stored);
  static constexpr int kKeyPieces = kHeadSize / (4 * kPiece), kValuePieces = kHeadSize / (8 * kPiece);
  static constexpr bool kQueryInRegisters = kHeadSize <= 128;
  // Whether the query, until it is in registers, stands in the last stage, which is not filled before the loop begins.
  static constexpr bool kQueryInStage = kQueryInRegisters && !kE4m3;
};

// A step of a warp. Every lane reads back what it wrote itself: shared memory stands in for registers that loads could
// be on their way to. With row = lane / 4 and t = lane % 4 a lane holds of K, for keys row and row + 8, dimensions
// kPiece (4 c + t) ..; of V, for keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, dimensions kPiece (8 c + row) ...
template <class C>
struct Stage {
  uint4 k[2][C::kKeyPieces][32];
  uint4 v[4][C::kValuePieces][32];
};

struct StageScales {
  float k[kStepKeys], v[kStepKeys];
};

// A warp's result for a segment, on its way to the others.
template <class C>
struct WarpResult {
  float o[kRows][C::kHeadSize + 4];  // not normalised
  float2 statistics[kRows];          // maximum, sum
};

template <class C>
struct Query {
  typename C::Element row[kRows][C::kHeadSize + 8];
};

struct Nothing {};

template <class C>
struct alignas(128) SharedMemory {
  union {
    Stage<C> stage[C::kWarps][C::kStages];
    WarpResult<C> result[C::kWarps];
  };
  StageScales scales[C::kE4m3 ? C::kWarps : 1][C::kE4m3 ? C::kStages : 1];
  std::conditional_t<C::kQueryInStage, Nothing, Query<C>> q;
  std::int64_t sums[C::kWarps];  // of a scan
  std::int64_t found[2];

  __device__ Query<C>& query() {
    if constexpr (C::kQueryInStage) {
      static_assert(sizeof(Query<C>) <= sizeof(Stage<C>));
      return *reinterpret_cast<Query<C>*>(&stage[0][C::kStages - 1]);
    } else {
      return q;
    }
  }
};

}  // namespace heddle::cuda::sm80::attention_decode

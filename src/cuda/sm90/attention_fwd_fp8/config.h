// Tiles, stages and shared memory of the e4m3 forward on Hopper.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/tile.cuh"
#include "cuda/sm90/attention/work.cuh"
#include "cuda/sm90/attention_fwd_fp8/variants.h"
#include "problem/key_walk.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

using attention::kNoMoreTiles;
using attention::kRows;
using attention::kWorkSlots;
using attention::TileWork;
using attention::Work;

constexpr int kRowBytes = 128;  // of every tile: head sizes are padded to it, and 128 keys fill a row of V^T

// Walk: which tiles of keys a tile of rows goes through.
template <class Output_, Tiles kTiles, TileWalk Walk_ = BandWalk<int>>
struct Config {
  using Element = __nv_fp8_e4m3;
  using Output = Output_;
  using Walk = Walk_;
  static constexpr int kHeadSize = kTiles.head;   // a multiple of 32
  static constexpr int kValueSize = kTiles.head;  // a multiple of 16
  static constexpr int kTileK = 128;
  static constexpr int kStages = kTiles.stages;
  static constexpr bool kTokenScales = kTiles.token_scales;
  // Arrivals of a warp at barriers of values. With scales by token every lane arrives itself, as each writes or reads
  // scales; else one lane does for all.
  static constexpr int kArrivals = kTokenScales ? 32 : 1;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kTransposers = 2;   // warps
  static constexpr unsigned kOptions = 0;  // it has no softcap, ALiBi, bias or mask
  static constexpr bool kIsPiece = false;
  static constexpr bool kRemovesPairs = false;
  static constexpr bool kRepeatsTiles = true;   // where exponentials overflowed
  static constexpr bool kGuessesMaxima = true;  // see softmax.cuh
  static constexpr int kProducerRegisters = kValueSize > 96 ? 40 : 56;
  static constexpr int kConsumerRegisters = kValueSize > 96 ? 232 : 224;
};

// [kHeight] rows of 128 bytes, swizzled. As a 16-bit tile of one panel it is one of the 16-bit kernel's.
template <int kHeight>
using Tile = attention::Tile<std::uint16_t, kHeight, kRowBytes / 2>;

// What a consumer thread needs once a tile of query rows only, and has no registers for.
struct alignas(16) Parked {
  float factor[2];  // O, over the sum of P, must be multiplied with it
  unsigned works;   // how many tiles and pauses the thread has taken
  std::uint32_t q_phase;
};

// The scales of a tile of keys; see token_scales.cuh.
template <class C>
struct alignas(16) TokenScales {
  float k[C::kTileK], v[C::kTileK];  // v: over the largest magnitude
  float largest_v;
};

template <class C>
struct SharedMemory {
  Tile<kRows> q[C::kConsumers];
  Tile<C::kTileK> k[C::kStages];
  Tile<C::kTileK> v[C::kStages];                   // as it comes: [key, dim]
  Tile<C::kValueSize + 8> transposed[C::kStages];  // [dim, key], in the orders of transposer.cuh; then 8 rows of ones
  Parked parked[128 * C::kConsumers];
  TileWork<typename C::Walk> work[kWorkSlots];
  ptx::Barrier work_ready[kWorkSlots], work_free[kWorkSlots];
  ptx::Barrier q_ready[C::kConsumers], q_free[C::kConsumers];
  ptx::Barrier k_ready[C::kStages], k_free[C::kStages];
  ptx::Barrier v_landed[C::kStages], v_taken[C::kStages];
  ptx::Barrier v_ready[C::kStages], v_free[C::kStages];  // of V^T
  struct Nothing {};
  std::conditional_t<C::kTokenScales, TokenScales<C>, Nothing> scales[C::kStages];  // with v
  ptx::Barrier work_ending;  // the producer of keys, to the scheduler: few keys are left of a tile
  attention::PackedPlace packed_place;
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

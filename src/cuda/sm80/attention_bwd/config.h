// Tiles and shared memory of the backward for Ampere and Ada.
#pragma once

#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/attention/work.cuh"
#include "cuda/sm80/attention_bwd/variants.h"
#include "problem/key_walk.h"

namespace heddle::cuda::sm80::attention_bwd {

using attention::Float32;
using attention::kGroupRows;
using attention::recomputed_by_tile;
using attention::swizzled;
using attention::Tile;

// A warp's share of a matrix of sums [kRows, kColumns]: groups of 16 rows, blocks of 8 columns.
template <int kWarps, int kRowWarps, int kRows, int kColumns>
struct Share {
  static constexpr int kGroups = kRows / kRowWarps / kGroupRows, kBlocks = kColumns / (kWarps / kRowWarps) / 8;
  using Sums = float[kGroups][kBlocks][4];
  __device__ static unsigned first_row(unsigned warp) { return warp % kRowWarps * (kGroupRows * kGroups); }
  __device__ static unsigned first_column(unsigned warp) { return warp / kRowWarps * (8 * kBlocks); }
};

template <int kGroups, int kBlocks>
__device__ inline void clear(float (&sums)[kGroups][kBlocks][4]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) sums[g][n][0] = sums[g][n][1] = sums[g][n][2] = sums[g][n][3] = 0.0f;
  }
}

// kProducts: of the tensor cores for one of elements, as in the forward. Walk: which tiles of query rows a tile of keys
// goes through; to a walk over the transposed band these are keys.
template <class T, int kProducts_, int kHeadSize_, Tiling kTiling, bool kScoreOptions_, TileWalk Walk_ = BandWalk<int>>
struct Config {
  using Walk = Walk_;
  using Element = T;
  static constexpr int kProducts = kProducts_;
  static constexpr int kHeadSize = kHeadSize_;  // the larger of D and Dv, rounded up
  static constexpr int kThreads = 32 * kTiling.warps, kBlocks = kTiling.blocks;
  static constexpr int kTileQ = kTiling.tile_q, kTileK = kTiling.tile_k;
  static constexpr bool kScoreOptions = kScoreOptions_;           // softcap, ALiBi, bias, mask, dropout, any scale
  static constexpr std::uint32_t kPitch = kHeadSize * sizeof(T);  // bytes of a row in shared memory

  // Small tiles have scores for some of the warps only.
  static constexpr int kScoreWarps = kTiling.warps < kTileQ * kTileK / 128 ? kTiling.warps : kTileQ * kTileK / 128;
  using Scores = Share<kScoreWarps, kTiling.score_warps, kTileQ, kTileK>;
  using Keys = Share<kTiling.warps, kTiling.key_warps, kTileK, kHeadSize>;
  using Rows = Share<kTiling.warps, kTiling.row_warps, kTileQ, kHeadSize>;

  // A warp's scores as the functions of sm80/attention/scores.cuh take them.
  struct WarpScores {
    using Element = T;
    static constexpr int kGroups = Scores::kGroups, kTileK = 8 * Scores::kBlocks;
  };

  // Rows of P and dS in shared memory: at least the 128 bytes that the swizzle needs.
  static constexpr int kPairColumns = kTileK * sizeof(T) < 128 ? 128 / sizeof(T) : kTileK;
  static constexpr std::uint32_t kPairPitch = kPairColumns * sizeof(T);
};

// Which key tile a CTA has.
struct Work {
  // What the functions of sm80/attention/scores.cuh read: the sequence and the head at hand.
  attention::Work scores;
  int kv_head;
  int unit;                 // of params.h
  int first_head, heads;    // of the group, that the CTA goes through
  int first_key;            // of the tile
  int k_rows;               // stored keys of the sequence
  Interval<int> met;        // keys that any row of the sequence attends, by causality and window
  Interval<int> steps;      // the walk's: kept apart, they leave the loop as it is assembled without a walk
  std::int64_t stored_row;  // of position 0 in lse_log2, delta and the sums of dQ, in a head
  const std::byte *k, *v;   // this head's: key 0
  int key_offset;           // as in Sequence
  int far;                  // what scores.off leaves out of Sequence::off, where it lies beyond its limits
  bool takes_turns;         // at the sums of dQ
};

// The same with the query tiles that the tile of keys goes through.
template <class Walk>
struct TileWork : Work {
  Walk walk;
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, C::kTileK, C::kHeadSize> k, v;
  Tile<T, C::kTileQ, C::kHeadSize> q, d_o;
  Tile<T, C::kTileQ, C::kPairColumns> p, ds;
  alignas(16) float lse_log2[C::kTileQ], delta[C::kTileQ];
  // Keys that a row of the query tile attends, in turn for even and odd steps: bit 2 n + c of word t is column 2 t + c
  // of block n.
  std::uint32_t attended[2][4];
  TileWork<typename C::Walk> work;  // here rather than in registers, which the products need
};

// A warp's rows of dS, to be multiplied with the columns of K in pieces.
template <class C, int kGroups>
struct Left;

}  // namespace heddle::cuda::sm80::attention_bwd

// Tiles and shared memory of the Hopper backward.
#pragma once

#include "cuda/sm90/attention_bwd/params.h"
#include "cuda/sm90/attention_fwd/config.h"

namespace heddle::cuda::sm90::attention_bwd {

using attention_fwd::kPanel;
using attention_fwd::RingPosition;
using attention_fwd::Tile;

constexpr int kConsumers = 2;        // warpgroups
constexpr int kKeys = kTileK / 2;    // of one: the M of its products
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kStages = 2;  // of q and dO

template <class T, int kHeadSize_, int kTileQ_>
struct Config {
  using Element = T;
  static constexpr int kHeadSize = kHeadSize_;  // D and Dv, at most
  static constexpr int kTileQ = kTileQ_;
  // dQ of a tile is two blocks of 64 rows and 64 dims, one a warpgroup.
  static_assert(kHeadSize * kTileQ == 2 * 64 * 64);
};

// What this CTA computes.
struct Work {
  int sequence, kv_head;
  int q_batch, q_row;        // of the sequence's first row in the tensors of q
  int k_batch, k_row;
  int statistics_row;        // of the sequence's first row in lse_log2 and delta, in its head
  int sq, off;
  int first_key, keys;       // of the tile; keys in use from there on, at most kTileK
  int stored_keys;           // rows of dk and dv to be written
  int first_tile, tiles;     // query tiles of each head that attend keys of this tile
  bool clears_rows;          // rows from sq on may hold anything in the last tile
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, kTileK, C::kHeadSize> k, v;
  Tile<T, C::kTileQ, C::kHeadSize> q[kStages], d_o[kStages];
  Tile<T, C::kTileQ, kTileK> ds[2];  // dS, keys running fastest: a panel for each warpgroup
  // A warp's 16 rows on their way out: of dQ sums, and at the end of dK and dV, 64 columns at a time.
  union alignas(128) Staging {
    float dq[16 * 64];
    T rows[16][kPanel];
  } staging[4 * kConsumers];
  alignas(16) float lse[kStages][C::kTileQ], delta[kStages][C::kTileQ];
  Work work;
  bool exists;  // work
  ptx::Barrier k_ready, v_ready;
  ptx::Barrier q_ready[kStages], d_o_ready[kStages], landed[kStages], free[kStages];
  ptx::Barrier ds_ready[2], ds_free[2];  // for both warpgroups' dQ, by each of their warps
};

}  // namespace heddle::cuda::sm90::attention_bwd

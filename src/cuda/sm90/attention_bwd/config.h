// Tiles and shared memory of the Hopper backward.
#pragma once

#include <type_traits>

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/tile.cuh"
#include "cuda/sm90/attention_bwd/variants.h"
#include "problem/key_walk.h"

namespace heddle::cuda::sm90::attention_bwd {

using attention::kPanel;
using attention::Tile;

constexpr int kConsumers = 2;  // warpgroups
constexpr int kKeys = 64;      // the M of their products
constexpr int kThreads = 128 * (1 + kConsumers);
// At launch each of three warpgroups has 168 registers a thread. The consumers wait until the producer has given back
// what they ask for beyond that: were the sum larger, they would wait forever.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);

// Walk: which tiles of query rows a tile of keys goes through; to a walk over the transposed band these are keys. A
// list with parts says of each tile of rows which warpgroup's keys it meets.
template <class T, Tiles kTiles, Option kOption_, TileWalk Walk_ = BandWalk<int>>
struct Config {
  using Walk = Walk_;
  static constexpr bool kListed = !std::is_same_v<Walk, BandWalk<int>>;
  static constexpr bool kHasParts = requires(const Walk walk) { walk.parts(0); };
  using Element = T;
  static constexpr int kHeadSize = kTiles.head;                                // D and Dv, at most
  static constexpr int kColumns = (kHeadSize + kPanel - 1) / kPanel * kPanel;  // as stored, zeros behind the head size
  static constexpr int kTileQ = kTiles.rows;
  static constexpr Option kOption = kOption_;
  // Head sizes up to 128: each warpgroup has 64 keys, and half of dQ. Above, dK and dV of 64 keys take all registers:
  // one warpgroup computes P and dV, the other one dS and dK.
  static constexpr bool kSplit = kHeadSize > 128;
  static constexpr int kTileK = kSplit ? kKeys : kConsumers * kKeys;
  static constexpr int kStages = 2, kOutputStages = kSplit ? 1 : 2;  // of q and of dO
  static_assert(kSplit ? kTileQ == 64 : kColumns * kTileQ == kConsumers * 64 * 64);
};

// What this CTA computes.
struct Work {
  int sequence, kv_head, part;
  int head, heads;     // the first query head, and how many
  int key_sums_row;    // of the sequence's first key in the sums of dk and dv, in its head
  int q_batch, q_row;  // of the sequence's first row in the tensors of q
  int k_batch, k_row;
  int statistics_row;  // of the sequence's first row in lse_log2 and delta, in its head
  int sq, off;
  int first_key;          // of the tile
  int begin, keys;        // those that some row attends by its band: from first_key + begin, to first_key + keys
  int stored_keys;        // rows of dk and dv to be written
  int first_step, steps;  // of the walk over query tiles, with each head
  int start;              // the one to begin with; after the last comes the first
  // For deterministic sums (schedule.cuh). tile: of keys. Where tiles of keys start at different query tiles, this one
  // is number `place` of the `chunk` ones of its chunk, which begins with tile chunk_first; else chunk is 0.
  int tile, chunk, place, chunk_first;
  int last_key;             // tile of keys in use
  int first_row, last_row;  // the rows that attend some key lie between
  bool clears_end;          // rows from last_row on may hold anything and must be cleared; else copies bring zeros
  bool takes_turns;         // at the sums of dQ, if those are deterministic
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
  Tile<T, C::kTileQ, C::kHeadSize> q[C::kStages], d_o[C::kOutputStages];
  Tile<T, C::kTileQ, C::kTileK> ds[2];  // dS, keys running fastest: a panel for each warpgroup that writes it
  // A warp's 16 rows on their way out: of dQ sums, and at the end of dK and dV, 64 columns at a time.
  union alignas(128) Staging {
    float dq[16 * 64];
    T rows[16][kPanel];
  } staging[4 * kConsumers];
  struct Nothing {};
  // P from one warpgroup's registers to the other's: what thread t has in registers 4 m to 4 m + 3.
  std::conditional_t<C::kSplit, uint4[4][128], Nothing> probabilities;
  alignas(16) float lse[C::kStages][C::kTileQ], delta[C::kOutputStages][C::kTileQ];
  TileWork<typename C::Walk> work;
  bool exists;                        // work
  bool suspect[C::kTileK], attended;  // closed_keys.cuh
  // Whether the tile of rows meets a warpgroup's keys; if not, these are as keys behind the last one.
  std::conditional_t<C::kHasParts, bool[C::kStages][kConsumers], Nothing> named;
  // Keys of the tile that a row of the listed tiles meets, a bit each.
  std::conditional_t<C::kListed, std::uint32_t[C::kTileK / 32], Nothing> met_keys;
  ptx::Barrier k_ready, v_ready;
  ptx::Barrier q_ready[C::kStages], q_free[C::kStages], landed[C::kStages];
  ptx::Barrier d_o_ready[C::kOutputStages], d_o_free[C::kOutputStages];
  ptx::Barrier ds_ready[2], ds_free[2];  // for both warpgroups' dQ
  ptx::Barrier p_ready, p_free;
  ptx::Barrier staged[kConsumers][2], staging_free[kConsumers];  // a warpgroup's block of dQ, of even and odd tiles
};

}  // namespace heddle::cuda::sm90::attention_bwd

// Tiles, roles and shared memory of the decode kernel.
#pragma once

#include <cstdint>

#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_decode/tiles.h"
#include "cuda/sm90/attention_decode/variants.h"

namespace heddle::cuda::sm90::attention_decode {

constexpr int kPanel = 128;  // bytes, the width of the swizzle
constexpr int kMaxStages = 16, kPieces = 4;
constexpr int kMaxRows = 256;  // of a unit, over all its heads

// T: element type of the products. Scales that differ from key to key, as a choice at run time, would cost the others a
// tenth.
template <class T, Tiles kTiles, bool kE4m3_>
struct Config {
  using Element = T;
  static constexpr int kSize = kTiles.head;
  static constexpr int kRowTiles = kTiles.row_tiles;  // of a warp
  static constexpr bool kE4m3 = kE4m3_;
  static constexpr bool kWarpgroups = kTiles.warpgroups;
  static constexpr bool kKeyScales = kTiles.key_scales;
  static constexpr int kKeyBytes = kE4m3 ? 1 : 2;
  static constexpr int kPanels = kSize * kKeyBytes <= kPanel ? 1 : kSize * kKeyBytes / kPanel;
  static constexpr int kPanelElements = kPanel / kKeyBytes;
  static constexpr bool kQInRegisters = kRowTiles == 1 && kSize <= 128;
  // Where warpgroups multiply and q has no place in registers, it is an operand in shared memory: [panel][row],
  // swizzled as keys are.
  static constexpr bool kQSwizzled = kWarpgroups && !kQInRegisters;
  static constexpr int kQPitch =
      2 * kSize + (kQSwizzled ? 0 : 16);  // bytes of a row of q; the 16 spread rows over the banks
  static constexpr bool kManyRegisters = kRowTiles * kSize > 128;  // in O alone 128
  static constexpr int kPassColumns = kSize < 128 ? kSize : 128;   // of O, merged at a time
  static constexpr int kMergePitch = kPassColumns + 8;             // floats; the 8 spread rows over the banks
  // Appends that find scales take the query warps some more.
  static constexpr int kServiceRegisters = (kManyRegisters ? 72 : 88) + (kKeyScales ? 16 : 0);
  static constexpr int kConsumerRegisters = (kManyRegisters ? 216 : 208) - (kKeyScales ? 8 : 0);
  // Words of a warp in the merge buffer; while it attends, they hold the scores of a product, one by one (scores.cuh).
  static constexpr int kScoreWords = 32 * (kWarpgroups ? kGroupKeys / 2 : 8);
  static constexpr int kMergeWords = 8 * kMergePitch > kScoreWords ? 8 * kMergePitch : kScoreWords;
  static constexpr int kMergeBytes = kConsumerWarps * kMergeWords * 4;
};

// What a CTA computes before it turns to another unit.
struct alignas(16) Piece {
  int sequence;   // < 0: no more pieces
  int head, row;  // first kv head, first row of each
  int q_begin, q_rows, sq, sk, off;
  int cache_row;             // of caches that are not paged
  int k_begin;               // slot of key 0; slots count from the start of the sequence's storage (packed: of all)
  int first_slot, end_slot;  // of the first block; behind the last slot that may be read
  int blocks;
  int begin, end;              // keys that some row attends
  int whole_begin, whole_end;  // keys that every row attends by its band
  int new_slot;                // keys from this slot on are written by this launch
  int slot;                    // where the partial result goes; < 0: it is complete
  // What to do with the unit's partial results after this piece. kCluster: they are in the cluster's shared memory.
  enum Merge { kNone, kNow, kLast, kCluster } merge;
  int merge_first, merge_stride, merge_count;
};

// Partial result n of a unit. Equal shares: a CTA's first slot holds the piece of a unit that began in an earlier CTA,
// its second one the piece of a unit that goes on in the next.
__device__ inline int merge_slot(const Piece& piece, int n) {
  return piece.merge_first + n * piece.merge_stride + (n == 0 && piece.merge_stride == 2 ? 1 : 0);
}

// The fixed part of the shared memory; q, the merge buffer and the tiles follow (Plan).
struct Control {
  Piece pieces[kPieces], last;  // last: whose merge waits for the end
  ptx::Barrier piece_ready[kPieces], piece_free[kPieces];
  ptx::Barrier q_requested, q_ready, q_free, appended;
  ptx::Barrier full[kMaxStages], empty[kMaxStages];
  float row_factor[kMaxRows];  // of scores: the scale, and what an e4m3 kernel took out of q
  float max[kConsumerWarps][2 * kRowTile], sum[kConsumerWarps][2 * kRowTile];
  const float* scale_row[kConsumerWarps]
                        [2];  // where scales of K and of V of a warp's sequence and kv head begin, or null
  // Which keys of a product some row of a warp attends: of key 8 n + 2 a + c, bit 2 n + c of word a. For warpgroups.
  std::uint32_t attended[kConsumerWarps][4];
};

template <class C>
struct SharedMemory {
  std::byte* base;
  const Plan& plan;
  __device__ Control& control() const { return *reinterpret_cast<Control*>(base); }
  __device__ std::byte* q() const { return base + plan.q_offset; }
  __device__ float* merge() const { return reinterpret_cast<float*>(base + plan.merge_offset); }
  // A CTA's partial result for its cluster, once its only piece is done: {max, sum} of each row, then the rows.
  __device__ float* partial() const { return reinterpret_cast<float*>(base + plan.tiles_offset); }
  __device__ std::byte* tile(int stage) const {
    return base + plan.tiles_offset + stage * (C::kPanels * plan.panel_bytes);
  }
};

// Whether the producer copies q itself; else query warps bring it.
template <class C>
__device__ inline bool copies_q(const Params& p) {
  return C::kQInRegisters && !C::kE4m3 && p.copies_q;
}

// Every thread comes here once: the barriers are made, and what earlier grids wrote is there.
__device__ inline void start() {
  wait_for_previous_grid();
  __syncthreads();
}

}  // namespace heddle::cuda::sm90::attention_decode

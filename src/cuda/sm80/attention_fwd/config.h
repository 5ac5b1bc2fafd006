// Tiles and shared memory of the forward for Ampere and Ada.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::sm80::attention_fwd {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroupRows = 16;  // the M of mma.m16n8k16

// How rows come from global to shared memory (loader.cuh).
struct AlignedRows;  // contiguous; addresses, strides and sizes in multiples of 16 bytes
struct StridedRows;  // anything

template <class T, int kHeadSize_, int kGroups_, int kTileK_, int kBlocks_, bool kScoreOptions_, class Rows_>
struct Config {
  using Element = T;
  using Rows = Rows_;
  static constexpr int kHeadSize = kHeadSize_;  // the larger of D and Dv, rounded up
  static constexpr int kGroups = kGroups_;      // of 16 query rows, owned by one warp
  static constexpr int kTileQ = kWarps * kGroups * kGroupRows;
  static constexpr int kTileK = kTileK_;
  static constexpr int kBlocks = kBlocks_;               // on a multiprocessor, as registers allow
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, bias, mask, dropout, any scale
};

// Rows of 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that eight rows of one column meet all banks.
template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr std::uint32_t kPitch = kColumns * sizeof(T);
  T row[kRows][kColumns];
};

__device__ inline std::uint32_t swizzled(std::uint32_t pitch, unsigned row, unsigned chunk) {
  return row * pitch + ((chunk ^ (row % 8)) << 4);
}

// Which query tile a CTA computes, and which keys that tile meets.
struct Work {
  int b, h;
  int first;                   // position of the tile's row 0 in its sequence
  int q_rows, sq, off;         // as in Sequence
  int begin, end;              // keys that any row of the tile attends
  int k_begin, k_end;          // key tiles that hold them
  int whole_begin, whole_end;  // those that every row attends wholly
  int q_row, k_slot;           // of position 0 and key 0 in their storage
  const std::byte *k, *v;      // this head's: key 0; in a paged cache, slot 0 of page 0
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, C::kTileQ, C::kHeadSize> q;  // at the end, O on its way out
  Tile<T, C::kTileK, C::kHeadSize> k, v;
  Work work;  // here rather than in registers, which the products need
};

// The same value, of which the compiler believes that it changes with the tile (which is never negative): what is
// computed from it inside a loop stays inside, where registers are scarcer than instructions.
__device__ inline unsigned recomputed(unsigned value, int tile) { return value + (tile >> 31); }

}  // namespace heddle::cuda::sm80::attention_fwd

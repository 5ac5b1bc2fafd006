// Tiles and shared memory of the forward for Ampere and Ada.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::sm80::attention_fwd {

constexpr int kGroupRows = 16;  // the M of mma.m16n8k16 and mma.m16n8k8

// How rows come from global to shared memory (loader.cuh).
struct AlignedRows;  // contiguous; addresses, strides and sizes in multiples of 16 bytes
struct StridedRows;  // anything

struct Tiling {
  int warps;
  int groups;  // of 16 query rows, owned by one warp
  int tile_k;
  int blocks;          // on a multiprocessor, as registers allow
  int kept_steps = 0;  // of 16 dimensions of q that stay in registers, where there is room (16-bit operands)
};

// kProducts: of the tensor cores for one of elements. 1, or 3 for float32 with its own precision (products_tf32.cuh).
template <class T, int kProducts_, int kHeadSize_, Tiling kTiling, bool kScoreOptions_, class Rows_>
struct Config {
  using Element = T;
  using Rows = Rows_;
  static constexpr int kProducts = kProducts_;
  static constexpr int kHeadSize = kHeadSize_;  // the larger of D and Dv, rounded up
  static constexpr int kThreads = 32 * kTiling.warps, kGroups = kTiling.groups, kBlocks = kTiling.blocks;
  static constexpr int kTileQ = kTiling.warps * kGroups * kGroupRows, kTileK = kTiling.tile_k;
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, bias, mask, dropout, any scale
  static constexpr int kKeptSteps = kTiling.kept_steps;
  static constexpr std::uint32_t kPitch = kHeadSize * sizeof(T);  // bytes of a row in shared memory
};

template <class C>
concept Float32 = sizeof(typename C::Element) == 4;

// Rows of 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that eight rows of one column meet all banks.
template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr std::uint32_t kPitch = kColumns * sizeof(T);
  static constexpr int kPerChunk = 16 / sizeof(T), kChunks = kColumns / kPerChunk;
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
  Tile<T, C::kTileQ, C::kHeadSize> q;  // at the end, 16-bit rows of O on their way out
  Tile<T, C::kTileK, C::kHeadSize> k, v;
  Work work;  // here rather than in registers, which the products need
};

// The same value, of which the compiler believes that it changes with the tile (which is never negative): what is
// computed from it inside a loop stays inside, where registers are scarcer than instructions.
__device__ inline unsigned recomputed(unsigned value, int tile) { return value + (tile >> 31); }

}  // namespace heddle::cuda::sm80::attention_fwd

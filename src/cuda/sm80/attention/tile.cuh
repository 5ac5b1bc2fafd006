// Tiles in shared memory as mma.sync takes them, and what goes with them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle::cuda::sm80::attention {

constexpr int kGroupRows = 16;  // the M of mma.m16n8k16 and mma.m16n8k8

template <class C>
concept Float32 = sizeof(typename C::Element) == 4;

// Rows of 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that eight rows of one column meet all banks. Rows
// of four chunks meet them two by two: c ^ (r / 2 % 4).
__device__ inline std::uint32_t swizzled(std::uint32_t pitch, unsigned row, unsigned chunk) {
  return row * pitch + ((chunk ^ (pitch < 128 ? row / 2 % 4 : row % 8)) << 4);
}

template <class T, int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr std::uint32_t kPitch = kColumns * sizeof(T);
  static constexpr int kPerChunk = 16 / sizeof(T), kChunks = kColumns / kPerChunk;
  T row[kRows][kColumns];

  // Bytes from the tile's start to a chunk.
  __device__ static std::uint32_t offset(unsigned row, unsigned chunk) { return swizzled(kPitch, row, chunk); }
};

// The same value. tile is never negative, so that tile >> 31 is 0; but the compiler does not know, and takes the value
// for one that changes with the tile. So what is computed from it inside a loop over tiles is computed in each step,
// not kept in registers, which are scarcer than instructions.
__device__ inline unsigned recomputed_by_tile(unsigned value, int tile) { return value + (tile >> 31); }

}  // namespace heddle::cuda::sm80::attention

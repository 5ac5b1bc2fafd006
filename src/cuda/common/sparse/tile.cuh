// Tiles of gathered rows in shared memory, as ldmatrix and wgmma take them: panels of 64 16-bit columns, whose rows are
// 128 bytes, eight chunks of 16 with chunk c of row r at c ^ (r % 8).
#pragma once

#include <cstdint>

namespace heddle::cuda::sparse {

template <class T, int kRowCount, int kColumnCount>
struct alignas(1024) Tile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPerChunk = 16 / sizeof(T), kChunks = kColumns / kPerChunk, kPanelChunks = 8;
  static constexpr std::uint32_t kRowBytes = 16 * kPanelChunks, kPanelBytes = kRows * kRowBytes;
  static_assert(kChunks % kPanelChunks == 0 && kRows % 8 == 0);

  T panel[kChunks / kPanelChunks][kRows][kPanelChunks * kPerChunk];

  // Bytes from the tile's start to a chunk.
  static constexpr __host__ __device__ std::uint32_t offset(unsigned row, unsigned chunk) {
    return chunk / kPanelChunks * kPanelBytes + row * kRowBytes + ((chunk % kPanelChunks ^ row % 8) << 4);
  }
};

}  // namespace heddle::cuda::sparse

// The 4-bit cache of include/heddle/int4_cache.h to the byte (docs/kv_cache.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace heddle {

constexpr std::int64_t kInt4Keys = 64;      // of a block
constexpr std::int64_t kInt4Channels = 64;  // of a value that share a scale
constexpr std::int64_t kInt4Tail = 128;     // slots of the ring of 16-bit keys
constexpr std::int64_t kInt4Recent = 64;    // keys that stay in 16 bits at least

// Blocks of a sequence of `keys` keys; the others are in the ring, key j in slot j % kInt4Tail.
constexpr std::int64_t int4_blocks(std::int64_t keys) {
  return keys < kInt4Keys + kInt4Recent ? 0 : (keys - kInt4Recent) / kInt4Keys;
}

// Where a block of one kv head has what, in bytes. Scales and zeros are f16: of K [D], of V [Dv / 64][64 keys].
struct Int4Block {
  std::int64_t D = 0, Dv = 0;  // multiples of kInt4Channels

  constexpr std::int64_t v_groups() const { return Dv / kInt4Channels; }
  constexpr std::int64_t v_codes() const { return D * kInt4Keys / 2; }
  constexpr std::int64_t k_scales() const { return v_codes() + Dv * kInt4Keys / 2; }
  constexpr std::int64_t k_zeros() const { return k_scales() + 2 * D; }
  constexpr std::int64_t v_scales() const { return k_zeros() + 2 * D; }
  constexpr std::int64_t v_zeros() const { return v_scales() + 2 * v_groups() * kInt4Keys; }
  constexpr std::int64_t bytes() const { return v_zeros() + 2 * v_groups() * kInt4Keys; }

  // Byte of a code, and its lowest bit there. K lies key by key, channels side by side.
  constexpr std::int64_t k_code(std::int64_t key, std::int64_t d) const { return (key * D + d) / 2; }
  static constexpr int k_bit(std::int64_t /*key*/, std::int64_t d) { return static_cast<int>(d % 2 * 4); }
  // Of V, 16 bytes are what a lane of a matrix product takes: two neighbouring channels, 8 bytes of each, with 16 keys,
  // two neighbours of every eight.
  constexpr std::int64_t v_code(std::int64_t key, std::int64_t d) const {
    const std::int64_t piece = (d / 64 * 4 + d % 8 / 2) * 32 + d % 64 / 8 * 4 + key % 8 / 2;
    return v_codes() + piece * 16 + d % 2 * 8 + key / 32 * 4 + (key / 8 % 4 + 4 * (key % 2)) / 2;
  }
  static constexpr int v_bit(std::int64_t key, std::int64_t /*d*/) { return static_cast<int>(key / 8 % 2 * 4); }
  // From the first scale (zero) of V.
  constexpr std::int64_t v_scale(std::int64_t key, std::int64_t d) const {
    return 2 * (d / kInt4Channels * kInt4Keys + key);
  }
};

// Blocks in memory; strides in bytes. With a page table block n of a sequence is page table[b][n]; else it is block n
// of the sequence's row.
struct Int4Blocks {
  std::byte* data = nullptr;
  std::int64_t stride_row = 0, stride_block = 0, stride_h = 0;
  std::int64_t pages = 0;  // with a page table
  bool given = false;      // of a sequence whose keys are all in the ring, too, whose data may be null

  constexpr explicit operator bool() const { return given; }
};

}  // namespace heddle

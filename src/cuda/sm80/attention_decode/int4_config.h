// Tiles of decode attention over a cache in 4 bits: a warp takes a block of 64 keys at a time, which lies in one piece.
#pragma once

#include <type_traits>

#include "cuda/sm80/attention_decode/config.h"
#include "problem/int4_cache.h"

namespace heddle::cuda::sm80::attention_decode {

constexpr int kBlockKeys = static_cast<int>(kInt4Keys), kBlockTiles = kBlockKeys / 8;
static_assert(kBlockKeys == kCellKeys);

// A block as it is stored (docs/kv_cache.md). With row = lane / 4, t = lane % 4 and D the head size a lane has of K,
// for key 8 n + row, dimensions D / 4 t to D / 4 (t + 1) - 1; of V, for channels 64 g + 8 row + 2 m and the next, keys
// 8 n + 2 t and the next, all n.
template <int kHeadSize>
struct Int4Keys {
  static_assert(kHeadSize == 64 || kHeadSize == 128);
  static constexpr int kGroups = kHeadSize / static_cast<int>(kInt4Channels);  // of a value
  std::conditional_t<kHeadSize == 64, uint2, uint4> k[kBlockTiles][32];
  uint4 v[kGroups][4][32];
  std::uint16_t k_scale[kHeadSize], k_zero[kHeadSize];  // f16
  std::uint16_t v_scale[kGroups][kBlockKeys], v_zero[kGroups][kBlockKeys];
};
static_assert(sizeof(Int4Keys<64>) == Int4Block{64, 64}.bytes());
static_assert(sizeof(Int4Keys<128>) == Int4Block{128, 128}.bytes());

// Heads of 64 or 128.
template <class T, Tiles kTiles>
struct Int4Config : Config<T, T, kTiles> {
  static constexpr bool kInt4 = true;
  static constexpr bool kQueryInStage = false;  // read again behind the ring
  // Three CTAs leave 168 registers, which the ring's query would not fit into beside the blocks'.
  static constexpr bool kQueryInRegisters = kTiles.head == 128;
  static constexpr int kGroups = Int4Keys<kTiles.head>::kGroups;
};

// A stage holds 16 keys of the ring, as those of other caches do, or a block.
template <class T, Tiles kTiles>
struct Stage<Int4Config<T, kTiles>> {
  using C = Int4Config<T, kTiles>;
  using Keys = Int4Keys<kTiles.head>;
  uint4 k[2][C::kKeyPieces][32];
  uint4 v[4][C::kValuePieces][32];
  uint4 more[sizeof(Keys) / sizeof(uint4) - (2 * C::kKeyPieces + 4 * C::kValuePieces) * 32];

  __device__ Keys& block() { return *reinterpret_cast<Keys*>(&k); }
  __device__ const Keys& block() const { return *reinterpret_cast<const Keys*>(&k); }
};

}  // namespace heddle::cuda::sm80::attention_decode

// Tiles of decode attention over a cache in 4 bits: a warp takes a block of 64 keys at a time, which lies in one piece.
#pragma once

#include "core/int4_cache.h"
#include "cuda/sm80/attention_decode/config.h"

namespace heddle::cuda::sm80::attention_decode {

constexpr int kBlockKeys = static_cast<int>(kInt4Keys), kBlockTiles = kBlockKeys / 8;
static_assert(kBlockKeys == kCellKeys);

// Heads of 128. Stages are large: two of a warp are as many bytes under way as three of 16-bit keys.
template <class T>
struct Int4Config : Config<T, T, 128, 4, 2, 2> {
  static constexpr bool kInt4 = true;
  static constexpr bool kQueryInStage = false;  // read again behind the ring
};

// A block as it is stored (docs/kv_cache.md). With row = lane / 4 and t = lane % 4 a lane has of K, for key 8 n + row,
// dimensions 32 t to 32 t + 31; of V, for channels 64 g + 8 row + 2 m and the next, keys 8 n + 2 t and the next, all n.
struct Int4Keys {
  uint4 k[kBlockTiles][32];
  uint4 v[2][4][32];
  std::uint16_t k_scale[128], k_zero[128];  // f16
  std::uint16_t v_scale[2][kBlockKeys], v_zero[2][kBlockKeys];
};
static_assert(sizeof(Int4Keys) == Int4Block{128, 128}.bytes());

// A stage holds 16 keys of the ring, as those of other caches do, or a block.
template <class T>
struct Stage<Int4Config<T>> {
  uint4 k[2][4][32];
  uint4 v[4][2][32];
  uint4 more[sizeof(Int4Keys) / sizeof(uint4) - 16 * 32];

  __device__ Int4Keys& block() { return *reinterpret_cast<Int4Keys*>(&k); }
  __device__ const Int4Keys& block() const { return *reinterpret_cast<const Int4Keys*>(&k); }
};

}  // namespace heddle::cuda::sm80::attention_decode

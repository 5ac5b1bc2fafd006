// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace heddle::cuda::sm90::attention_fwd {

struct Params {
  // [B, H / pack, Sq, pack, D]; innermost first: D, pack, Sq, H / pack, B
  CUtensorMap q;
  // [B, S, Hkv, D], innermost first: D, S, Hkv, B
  CUtensorMap k, v;
  void* o;
  float* lse;         // or null
  const float* sink;  // [H] or null
  std::int64_t o_stride_b, o_stride_s, o_stride_h;
  std::int64_t lse_stride_b, lse_stride_h, lse_stride_s;
  std::int64_t sink_stride;
  int Sq, Sk, Dv, B;
  int heads;  // head units, H / pack
  int pack;   // query heads of a group that share a tile: a warpgroup's row r is position r / pack, head r % pack
  int pack_inverse;    // ceil(2^16 / pack): row / pack = row * pack_inverse >> 16 for rows of a warpgroup
  int kv_divisor;      // head units to a kv head
  int positions;       // of a warpgroup: kRows / pack
  int q_tiles, tiles;  // of one head unit, of all
  int section;         // head units (of all sequences) whose keys and values the L2 cache holds together
  int* next_tile;      // 0 at the start; or null: tiles are dealt out in turn
  // Row i attends keys j with i + off - left <= j <= i + off + right.
  int off, left, right;
  float scale_log2;  // scale * log2(e)
};

constexpr int kOpen = 1 << 30;  // a window without an edge

}  // namespace heddle::cuda::sm90::attention_fwd

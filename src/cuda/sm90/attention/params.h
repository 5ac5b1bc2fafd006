// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/divisor.h"
#include "problem/tile_lists.h"

namespace heddle::cuda::sm90::attention {

// How the consumers come by a bias or mask.
enum class PlaneAccess : int {
  none,    // there is none
  keys,    // by keys: all rows of a tile share one value a key, so each warp reads a tile's values once
  bulk,    // tiles by the tensor memory accelerator
  copies,  // asynchronous copies of 16 or 4 bytes to shared memory, ahead of their use
  direct,  // element by element, when it is needed
};

// A tensor read at [b, h, i, j]; strides in elements, 0 where it is broadcast.
struct ScorePlane {
  const void* data;
  PlaneAccess access;
  int copy_bytes;  // of one copy
  std::int64_t stride_b, stride_h, stride_i, stride_j;
};

// x -> tanh(inside x) / inside. Where inside |x| is small everywhere, as an odd polynomial.
struct Softcap {
  float inside, outside;  // scale / softcap, or 0: none; the inverse
  float limit;            // of |x|
  float series[4];
  float log2_series[4];  // times scale_log2
};

// Where rows and keys of a piece of a longer problem stand: row i at q_offset + row_step i, key j at key_offset +
// key_step j.
struct Positions {
  const int *q_offset, *key_offset;  // [B] or null: 0
  int row_step;
  Divisor key_step;
};

struct Params {
  // [B, H / pack, Sq, pack, D], innermost first: D, pack, Sq, H / pack, B. Packed sequences: B = 1, Sq is the total.
  CUtensorMap q;
  // [B, S, Hkv, D], innermost first: D, S, Hkv, B. Packed sequences: B = 1, S is the total.
  CUtensorMap k, v;
  // A bias or mask by PlaneAccess::bulk, innermost first: Sk, Sq, H, B, the last two 1 where it is broadcast.
  CUtensorMap plane;
  void* o;
  float* lse;         // or null
  const float* sink;  // [H] or null
  std::int64_t o_stride_b, o_stride_s, o_stride_h;
  std::int64_t lse_stride_b, lse_stride_h, lse_stride_s;
  std::int64_t sink_stride;
  int Sq, Sk, Dv, B;                       // Sq, Sk: the longest sequence's
  int q_rows, k_rows;                      // extents of the second dimension of q and of k and v
  const int *cu_seqlens_q, *cu_seqlens_k;  // [B + 1] or null; whatever they hold, no row beyond q_rows is written
  const int *seqused_q, *seqused_k;        // [B] or null
  int k_appended;                          // keys behind seqused_k
  int heads;                               // head units, H / pack
  int pack;  // query heads of a group that share a tile: a warpgroup's row r is position r / pack, head r % pack
  int pack_inverse;    // ceil(2^16 / pack): row / pack = row * pack_inverse >> 16 for rows of a warpgroup
  int kv_divisor;      // head units to a kv head
  int positions;       // of a warpgroup: kRows / pack
  int q_tiles, tiles;  // of one head unit (packed sequences: of the longest one), of all (packed: unknown, 2^30)
  int section;         // head units whose keys and values the L2 cache holds together; equal lengths: of all sequences
  int section_rows;    // packed: a section's sequences have so many rows of k together, or it is one sequence
  int* next_tile;      // 0 at the start; or null: tiles are dealt out in turn
  // Row i attends keys j with i + off - left <= j <= i + off + right, off = Sk - Sq (as used) or 0 if top_left.
  bool top_left;
  int left, right;
  float scale_log2;  // scale * log2(e)
  // The rest is for kernels with score options.
  float scale, scale_inverse;
  Softcap softcap;
  const float* alibi;  // [B, H] or null
  std::int64_t alibi_stride_b, alibi_stride_h;
  ScorePlane bias, mask;  // bias: 16-bit like q, or f32; mask: bytes
  bool bias_is_float;
  TileLists lists;  // of head units, for kernels whose walk is a ListWalk
  Positions piece;  // for kernels of pieces, whose bands are about these
  bool float_out;   // for the same: o is f32
  // Of tiles of equal lengths, for kernels without score options whose walk is a ListWalk; or null: as they are
  // numbered.
  const int* order;
};

}  // namespace heddle::cuda::sm90::attention

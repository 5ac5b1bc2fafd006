// What a launch tells the kernels.
#pragma once

#include "cuda/any/attention_bwd_rows/params.h"
#include "cuda/sm80/attention/params.h"

namespace heddle::cuda::sm80::attention_bwd {

struct Params {
  attention::Params scores;  // as in the forward: all that concerns scores, and q, k and v
  Operand d_o, dq, dk, dv;
  const float *lse_log2, *delta, *largest;  // as attention_bwd_rows wrote them
  float* dq_sums;  // [H][rows_per_head][head size of the instantiation], in fragments; null: no dq
  std::int64_t rows_per_head;
  int units;              // B * Hkv * splits
  int k_tiles;            // of the longest sequence
  Divisor kv_heads;       // Hkv
  Divisor splits;         // CTAs that share the heads of a group
  int split_heads;        // of one, but perhaps the last
  float* key_sums;        // [units, k_tiles, 2, tile_k, head size of the instantiation], dK and dV of splits; null: one
  bool last_rows_first;   // that a tile of keys goes through
  Divisor section;        // units whose rows the L2 cache holds together
  Divisor section_tiles;  // section * k_tiles
  bool last_keys_first;
  // Deterministic: how many key tiles have added to each query tile, [H][rows_per_head / tile_q]; null: any order.
  int* turns;
  int* ticket;                           // which CTA comes next, beside turns
  bool in_pieces;                        // rows of q, k, v and d_o may be read in pieces of 16 bytes
  bool out_pieces;                       // and those of dq, dk and dv be written so
  bool accumulate;                       // dq, dk and dv, f32, are added to
  float dk_scale, dv_scale, keep_scale;  // of the sums of dK, of dV; of a dP that dropout keeps

  // dbias
  Plane dbias;
  std::int64_t bias_batch, bias_heads, bias_rows, bias_columns;
  int q_tiles;
};

}  // namespace heddle::cuda::sm80::attention_bwd

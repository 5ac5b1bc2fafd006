// What a launch tells the kernels.
#pragma once

#include <cuda.h>

#include "cuda/any/attention_bwd_rows/params.h"
#include "problem/attention.h"
#include "problem/tile_lists.h"

namespace heddle::cuda::sm90::attention_bwd {

struct Params {
  // [batch, head, row, dim], innermost first: dim, row, head, batch; boxes of 64 dims.
  CUtensorMap q, d_o, k, v;
  AttentionBackwardProblem problem;
  const float *lse_log2, *delta, *largest;  // of each query row, as any/attention_bwd_rows lays them out
  // Sums of dS K in blocks of 64 query rows and 64 dims, [head][row / 64][dim / 64]: in each, what lane l of warp w has
  // in registers 4 m to 4 m + 3 of a product lies at word 256 w + 32 m + l of 16 bytes.
  float* dq;
  std::int64_t rows_per_head;  // of these
  // Deterministic only, else null: how many have added to a tile of dQ, [head][tile]; how many CTAs have started.
  int *turns, *ticket;
  int chunk;    // key tiles that start at different query tiles, see schedule.cuh
  int k_tiles;  // of the longest sequence; of all, if packed
  // CTAs that share the query heads of a kv head. More than one: each writes what it has of dK and dV to sums of its
  // own, [part][kv head], laid out as dq's, with rows as first_key_row() says.
  int parts;
  float *dk, *dv;
  std::int64_t key_rows_per_head;
  int units;         // B * Hkv * parts
  int section;       // units whose q, dO and dq the L2 cache holds together
  float scale_log2;  // scale * log2(e)
  // softcap * tanh(y) = softcap * (1 - 2 / (e^2y + 1)), y = scale / softcap times a product: 2 log2(e) scale / softcap,
  // and softcap * log2(e).
  float softcap_inside, softcap_log2;
  int left, right;  // row i attends keys j with i + off - left <= j <= i + off + right
  TileLists lists;  // of kv heads, or parts of their groups, for kernels whose walk is a ListWalk
};

// Sums that are to be rounded: dq's, or dk's and dv's if parts of them lie there.
struct Sums {
  const float* data;  // [part][heads][rows_per_head], in blocks
  int parts;
  bool of_keys;  // else of queries
  std::int64_t heads, rows_per_head, longest;
  Operand to;
  int size;  // dims that exist
  float factor;
};

// Rows of dk and dv sums, as any/attention_bwd_rows lays out those of queries.
constexpr std::int64_t key_rows_per_head(const AttentionProblem& p) {
  using any::attention_bwd_rows::kRowTile, any::attention_bwd_rows::round_up_to_tile;
  return p.cu_seqlens_k.given ? round_up_to_tile(p.k_rows + kRowTile * p.B) : p.B * round_up_to_tile(p.Sk);
}
constexpr std::int64_t first_key_row(const AttentionProblem& p, std::int64_t b, const Sequence& s) {
  using any::attention_bwd_rows::kRowTile, any::attention_bwd_rows::round_up_to_tile;
  return p.cu_seqlens_k.data ? (s.k_begin + kRowTile * b) / kRowTile * kRowTile : b * round_up_to_tile(p.Sk);
}

}  // namespace heddle::cuda::sm90::attention_bwd

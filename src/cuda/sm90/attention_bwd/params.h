// What a launch tells the kernels.
#pragma once

#include <cuda.h>

#include "core/attention_problem.h"
#include "cuda/any/attention_bwd_rows/params.h"

namespace heddle::cuda::sm90::attention_bwd {

constexpr int kOpen = 1 << 30;  // a window without an edge

struct Params {
  // [batch, head, row, dim], innermost first: dim, row, head, batch; boxes of 64 dims.
  CUtensorMap q, d_o, k, v;
  AttentionBackwardProblem problem;
  const float *lse_log2, *delta;  // of each query row, as any/attention_bwd_rows lays them out
  // Sums of dS K in blocks of 64 query rows and 64 dims, [head][row / 64][dim / 64]: in each, what lane l of warp w has
  // in registers 4 m to 4 m + 3 of a product lies at word 256 w + 32 m + l of 16 bytes.
  float* dq;
  std::int64_t rows_per_head;  // of these
  // Deterministic only, else null: how many have added to a tile of dQ, [head][tile].
  int* turns;
  int chunk;                   // key tiles that start at different query tiles, see schedule.cuh
  int k_tiles;                 // of the longest sequence; of all, if packed
  int units;                   // B * Hkv, or Hkv if packed
  int section;                 // units whose q, dO and dq the L2 cache holds together
  float scale_log2;            // scale * log2(e)
  int left, right;             // row i attends keys j with i + off - left <= j <= i + off + right
};

}  // namespace heddle::cuda::sm90::attention_bwd

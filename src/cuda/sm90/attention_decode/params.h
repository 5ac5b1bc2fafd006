// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/attention_problem.h"

namespace heddle::cuda::sm90::attention_decode {

// How a call is cut up, decided from extents alone: the lengths are read by the kernel.
//   unit    all keys of one sequence, for `heads` kv heads and `rows` query rows of each
//   block   `block` keys of a unit, what one stage of K or V holds
//   item    `item_blocks` blocks, what is dealt out
//   piece   blocks of one unit that a CTA takes one after the other
// Row r of a kv head is query position r / G, head r % G of its group.
struct Plan {
  int heads, head_groups;  // kv heads of a unit; units beside each other, Hkv / heads
  int rows, row_units;     // rows of a kv head in one unit; units that all G * Sq rows need
  int row_groups;          // warps beside each other along the rows
  int key_splits;          // warps that share a block's keys
  int block;               // keys; a power of two
  int box, box_shift;      // keys that one copy brings, and their log2: block, or what divides a page, too
  int box_pitch;           // 128-byte rows from one box to the next; not heads * box where that would cost banks
  int panel_bytes;         // of one 128-byte wide panel of a tile
  int stages;              // tiles in flight
  int item_blocks;         // 1; a fixed chunk where the cut must not depend on the batch
  int ctas, slots;         // bounds on the CTAs that get work and the partial results
  int q_offset, merge_offset, tiles_offset, shared_bytes;  // of the shared memory
  int slot_words;                                          // 16-byte words of a partial result in the workspace
};

struct Params {
  // Caches as [batch, head, row, dim], innermost first: dim, row, head, batch (a row of the cache or a page).
  CUtensorMap k, v;
  AttentionProblem problem;
  Plan plan;
  uint4* slots;        // partial results
  int left, right;     // row i attends keys j with i + off - left <= j <= i + off + right
  float scale_log2;    // scale * log2(e)
  bool equal_lengths;  // no sequence differs from the others
  bool plain;          // scores are only scaled, and masked by band
  bool scales_by_key;  // k_scale or v_scale differ from key to key
};

constexpr int kOpen = 1 << 30;  // a window without an edge
constexpr float kLog2e = 1.44269504088896341f;

}  // namespace heddle::cuda::sm90::attention_decode

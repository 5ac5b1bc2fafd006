// What a launch tells the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/any/row_band.h"
#include "cuda/common/bounded_sequence.h"
#include "cuda/common/divisor.h"
#include "problem/attention.h"

namespace heddle::cuda::sm90::attention_decode {

// How a call is cut up, decided from extents alone: the lengths are read by the kernel.
//   unit    all keys of one sequence, for `heads` kv heads and `rows` query rows of each
//   block   `block` keys of a unit, what one stage of K or V holds
//   item    `item_blocks` blocks, what is dealt out
//   piece   blocks of one unit that a CTA takes one after the other
// Row r of a kv head is query position r / G, head r % G of its group.
struct Plan {
  int heads, head_groups;       // kv heads of a unit; units beside each other, Hkv / heads
  int rows, row_units;          // rows of a kv head in one unit; units that all G * Sq rows need
  int row_groups, row_shift;    // warps beside each other along the rows, a power of two, and its log2
  int key_splits;               // warps that share a block's keys
  int block, block_shift;       // keys, a power of two, and its log2
  int box, box_shift;           // keys that one copy brings, and their log2: block, or what divides a page, too
  int box_pitch;                // 128-byte rows from one box to the next; not heads * box where that would cost banks
  int panel_bytes;              // of one 128-byte wide panel of a tile
  int stages;                   // tiles in flight
  int item_blocks, item_shift;  // 1; a fixed chunk where the cut must not depend on the batch
  int ctas, slots;              // bounds on the CTAs that get work and the partial results
  int q_offset, merge_offset, tiles_offset, shared_bytes;  // of the shared memory
  int cluster, lane_shift;              // CTAs that share a unit as a cluster, and log2 of the lanes that has in the
                                        // merge; 1: no clusters, but equal shares of all items
  Divisor by_rows, by_group, by_quads;  // by rows, by G, by Dv / 4
  int merge_shift;                      // log2 of the threads that share an item of a merge through the workspace
  int cluster_items;                    // of a unit's quads, those that each CTA of a cluster writes
  int slot_words;                       // 16-byte words of a partial result in the workspace
};

constexpr int kMaxCluster = 16;  // CTAs; more than eight is not portable, but every Hopper GPU has it

// One sequence, as any of its units sees it.
struct Span {
  int q_begin, q_rows, sq, sk, off, k_begin;  // as in Sequence
  int begin, end;                             // keys that some row attends
  int whole_begin, whole_end;                 // keys that every row attends
  int first_slot, end_slot;                   // blocks start at first_slot
  int new_slot;                               // keys from this slot on are written by the launch
  int blocks, items;
};

constexpr Span span_of(const AttentionProblem& p, const Plan& plan, const RowBand& band, int b) {
  const Sequence s = bounded(p, p.sequence(b), p.batch_invariant);  // slots of partial results
  const auto within = [](int x, int high) { return x < 0 ? 0 : x > high ? high : x; };
  Span span{};
  span.q_begin = static_cast<int>(s.q_begin);
  span.q_rows = static_cast<int>(s.q_rows);
  span.sq = static_cast<int>(s.sq);
  span.sk = static_cast<int>(s.sk);
  span.off = row_band_off(s);
  span.k_begin = static_cast<int>(s.k_begin);
  span.begin = within(band.begin(span.off, 0), span.sk);
  span.end = span.sq == 0 ? 0 : within(band.end(span.off, span.sq - 1), span.sk);
  if (span.end < span.begin) span.end = span.begin;
  span.whole_begin = within(band.begin(span.off, span.sq - 1), span.sk);
  span.whole_end = within(band.end(span.off, 0), span.sk);
  int from = span.k_begin + span.begin;
  span.end_slot = span.k_begin + span.end;
  span.new_slot = kOpen;
  if (p.append.k_new.data != nullptr) {  // new keys are written with the blocks that hold them, attended or not
    const int rows = static_cast<int>(s.k_rows);
    span.new_slot = within(p.seqused_k[b], rows);
    const int length = p.seqused_k[b] < rows ? p.seqused_k[b] : rows;  // so that the sum cannot overflow
    span.end_slot = within(length + static_cast<int>(p.k_appended), rows);
    if (from > span.new_slot) from = span.new_slot;
  }
  // Blocks start at multiples of their size, as pages do; in packed storage, from the sequence's own start.
  const int base = p.cu_seqlens_k.data != nullptr ? span.k_begin : 0;
  span.first_slot = base + ((from - base) & -plan.block);
  span.blocks = span.end_slot > from ? (span.end_slot - span.first_slot + plan.block - 1) >> plan.block_shift : 0;
  span.items = (span.blocks + plan.item_blocks - 1) >> plan.item_shift;
  if (span.items == 0) span.items = 1;  // rows without keys are written, too
  return span;
}

struct Params {
  // Caches as [batch, head, row, dim], innermost first: dim, row, head, batch (a row of the cache or a page).
  CUtensorMap k, v;
  AttentionProblem problem;
  Plan plan;
  uint4* slots;  // partial results
  RowBand band;
  bool equal_lengths;  // no sequence differs from the others: all are `equal`
  Span equal;
  int equal_total, equal_share;  // items of all sequences, and of each CTA
  bool copies_q;                 // q needs no rotation, and no new keys come with it
  bool plain;                    // scores are only scaled, and masked by band
};

}  // namespace heddle::cuda::sm90::attention_decode

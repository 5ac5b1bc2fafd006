// Which blocks of which units a CTA computes. Every CTA gets an equal run of all items, so a unit may be shared by
// neighbours; whoever has a unit's end merges it, and so waits for CTAs of lower index only.
#pragma once

#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

// One sequence, as any of its units sees it.
struct Span {
  Sequence s;
  int begin, end;              // keys that some row attends
  int whole_begin, whole_end;  // keys that every row attends
  int first_slot, end_slot;    // blocks start at first_slot
  int new_slot;
  int blocks, items;

  __device__ Span(const Params& p, int b) : s(p.problem.sequence(b)) {
    const AttentionProblem& problem = p.problem;
    const int sq = static_cast<int>(s.sq), sk = static_cast<int>(s.sk), off = static_cast<int>(s.off);
    const int k_begin = static_cast<int>(s.k_begin);
    begin = clamp_to(off - p.left, sk);
    end = sq == 0 ? begin : max(clamp_to(sq + off + p.right, sk), begin);
    whole_begin = clamp_to(sq - 1 + off - p.left, sk);
    whole_end = clamp_to(off + p.right + 1, sk);
    int from = k_begin + begin;
    end_slot = k_begin + end;
    new_slot = kOpen;
    if (problem.append.k_new.data != nullptr) {  // new keys are written with the blocks that hold them, attended or not
      new_slot = clamp_to(problem.seqused_k[b], static_cast<int>(s.k_rows));
      end_slot = clamp_to(problem.seqused_k[b] + static_cast<int>(problem.k_appended), static_cast<int>(s.k_rows));
      from = min(from, new_slot);
    }
    // Blocks start at multiples of their size, as pages do; in packed storage, from the sequence's own start.
    const int base = problem.cu_seqlens_k != nullptr ? k_begin : 0;
    first_slot = base + (from - base) / p.plan.block * p.plan.block;
    blocks = end_slot > from ? (end_slot - first_slot + p.plan.block - 1) / p.plan.block : 0;
    items = max((blocks + p.plan.item_blocks - 1) / p.plan.item_blocks, 1);  // rows without keys are written, too
  }

 private:
  static __device__ int clamp_to(int x, int high) { return min(max(x, 0), high); }
};

// Held by a whole warp, all lanes alike.
class Schedule {
 public:
  __device__ explicit Schedule(const Params& params) : p(params) {
    // Sequences of equal length count as one entry.
    const int lane = static_cast<int>(threadIdx.x) % 32, sequences = static_cast<int>(p.problem.B);
    const int entries = p.equal_lengths ? 1 : sequences;
    const int times = p.plan.head_groups * p.plan.row_units * (p.equal_lengths ? sequences : 1);
    int total = 0;
    // First the sum of all items, which tells this CTA's share; then the sequence where it starts.
#pragma unroll 1
    for (bool known = false;; known = true) {
      int before = 0;
#pragma unroll 1
      for (int first = 0; first < entries; first += 32) {
        const int items = first + lane < entries ? Span(p, first + lane).items * times : 0;
        if (!known) {
          total += items;
          continue;
        }
        int through = items;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(0xffffffff, through, step);
          if (lane >= step) through += other;
        }
        const unsigned passed = __ballot_sync(0xffffffff, before + through > at);
        if (passed != 0) {
          const int found = __ffs(passed) - 1;
          sequence = first + found;
          in_sequence = at - before - __shfl_sync(0xffffffff, through - items, found);
          break;
        }
        before += __shfl_sync(0xffffffff, through, 31);
      }
      if (known) break;
      total = __reduce_add_sync(0xffffffff, total);
      share = (total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
      start = at = static_cast<int>(blockIdx.x) * share;
      end = min(at + share, total);
      if (at >= end) break;
    }
    if (p.equal_lengths) {
      const int each = total / sequences;
      sequence = in_sequence / each;
      in_sequence %= each;
    }
  }

  // Where the next piece lies; false if there is none.
  __device__ bool next(Piece& piece) {
    if (at >= end) return false;
    const int units = p.plan.head_groups * p.plan.row_units;
    for (;; ++sequence) {
      const Span span(p, sequence);
      if (in_sequence < span.items * units) return describe(piece, span);
      in_sequence -= span.items * units;
    }
  }

 private:
  __device__ bool describe(Piece& piece, const Span& span) {
    const Plan& plan = p.plan;
    const int unit = in_sequence / span.items, item = in_sequence % span.items;
    const int count = plan.item_blocks > 1 ? 1 : min(span.items - item, end - at);
    const bool whole = count == span.items, ends = item + count == span.items;
    const int block = item * plan.item_blocks;
    const Sequence& s = span.s;
    piece.sequence = sequence;
    piece.head = unit % plan.head_groups * plan.heads;
    piece.row = unit / plan.head_groups * plan.rows;
    piece.q_begin = static_cast<int>(s.q_begin);
    piece.q_rows = static_cast<int>(s.q_rows);
    piece.sq = static_cast<int>(s.sq);
    piece.sk = static_cast<int>(s.sk);
    piece.off = static_cast<int>(s.off);
    const AttentionProblem& problem = p.problem;
    piece.cache_row = problem.cu_seqlens_k != nullptr ? 0
                      : problem.cache_batch_idx != nullptr
                          ? static_cast<int>(clamped(problem.cache_batch_idx[sequence], 0, problem.k_batches - 1))
                          : sequence;
    piece.k_begin = static_cast<int>(s.k_begin);
    piece.first_slot = span.first_slot + block * plan.block;
    piece.end_slot = span.end_slot;
    piece.blocks = min(count * plan.item_blocks, span.blocks - block);
    piece.begin = span.begin;
    piece.end = span.end;
    piece.whole_begin = span.whole_begin;
    piece.whole_end = span.whole_end;
    piece.new_slot = span.new_slot;
    const int unit_start = at - item;
    if (plan.item_blocks > 1) {  // a slot for every item
      piece.slot = whole ? -1 : at;
      piece.merge = whole || !ends ? Piece::kNone : unit_start >= start ? Piece::kNow : Piece::kLast;
      piece.merge_first = unit_start;
      piece.merge_stride = 1;
      piece.merge_count = span.items;
    } else {
      const int cta = static_cast<int>(blockIdx.x), first = unit_start / share;
      piece.slot = whole ? -1 : 2 * cta + (item == 0 ? 1 : 0);
      piece.merge = whole || !ends ? Piece::kNone : Piece::kLast;
      piece.merge_first = 2 * first;
      piece.merge_stride = 2;
      piece.merge_count = cta - first + 1;
    }
    at += count;
    in_sequence += count;
    return true;
  }

  const Params& p;
  int share, start, at, end;
  int sequence = 0, in_sequence = 0;
};

}  // namespace heddle::cuda::sm90::attention_decode

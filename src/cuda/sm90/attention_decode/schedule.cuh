// Which blocks of which units a CTA computes. Every CTA gets an equal run of all items, so a unit may be shared by
// neighbours; whoever has a unit's end merges it, and so waits for CTAs of lower index only.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

// Held by a whole warp, all lanes alike.
class Schedule {
 public:
  __device__ explicit Schedule(const Params& params) : p(params) {
    if (p.plan.cluster > 1) {  // a unit for each cluster, an equal share of it for each CTA
      const int unit = static_cast<int>(blockIdx.x / static_cast<unsigned>(p.plan.cluster)), rank = ptx::cluster_rank();
      sequence = static_cast<int>(static_cast<unsigned>(unit) / static_cast<unsigned>(units()));
      in_sequence = unit - sequence * units();
      const int items = (p.equal_lengths ? p.equal : span(sequence)).items;
      share =
          static_cast<int>(static_cast<unsigned>(items + p.plan.cluster - 1) / static_cast<unsigned>(p.plan.cluster));
      at = min(rank * share, items);
      end = min(at + share, items);
      return;
    }
    if (p.equal_lengths) {
      share = p.equal_share;
      start = at = static_cast<int>(blockIdx.x) * share;
      end = min(at + share, p.equal_total);
      const auto each = static_cast<unsigned>(p.equal.items * units());
      sequence = static_cast<int>(static_cast<unsigned>(at) / each);
      in_sequence = at - sequence * static_cast<int>(each);
      return;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32, sequences = static_cast<int>(p.problem.B);
    int total = 0;
    // First the sum of all items, which tells this CTA's share; then the sequence where it starts.
#pragma unroll 1
    for (bool known = false;; known = true) {
      int before = 0;
#pragma unroll 1
      for (int first = 0; first < sequences; first += 32) {
        const int items = first + lane < sequences ? span(first + lane).items * units() : 0;
        if (!known) {
          total += items;
          continue;
        }
        const int through = sum_through_lane(items, lane);
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
  }

  // Where the next piece lies; false if there is none.
  __device__ bool next(Piece& piece) {
    if (p.plan.cluster > 1) {
      if (end < 0) return false;
      describe(piece, p.equal_lengths ? p.equal : span(sequence), in_sequence, at,
               end - at);  // also if that is nothing
      piece.slot = -1;
      piece.merge = Piece::kCluster;
      end = -1;
      return true;
    }
    if (at >= end) return false;
    for (;; ++sequence) {
      const Span found = p.equal_lengths ? p.equal : span(sequence);
      if (in_sequence < found.items * units()) {
        const int unit = static_cast<int>(static_cast<unsigned>(in_sequence) / static_cast<unsigned>(found.items));
        const int item = in_sequence - unit * found.items;
        const int count = p.plan.item_blocks > 1 ? 1 : min(found.items - item, end - at);
        describe(piece, found, unit, item, count);
        divide(piece, found, item, count);
        at += count;
        in_sequence += count;
        return true;
      }
      in_sequence -= found.items * units();
    }
  }

 private:
  __device__ int units() const { return p.plan.head_groups * p.plan.row_units; }
  __device__ Span span(int b) const { return span_of(p.problem, p.plan, p.band, b); }

  // `count` items of a unit of the sequence, from `item` on.
  __device__ void describe(Piece& piece, const Span& span, int unit, int item, int count) {
    const Plan& plan = p.plan;
    const int block = item * plan.item_blocks;
    piece.sequence = sequence;
    const int row_unit = static_cast<int>(static_cast<unsigned>(unit) / static_cast<unsigned>(plan.head_groups));
    piece.head = (unit - row_unit * plan.head_groups) * plan.heads;
    piece.row = row_unit * plan.rows;
    piece.q_begin = span.q_begin;
    piece.q_rows = span.q_rows;
    piece.sq = span.sq;
    piece.sk = span.sk;
    piece.off = span.off;
    const AttentionProblem& problem = p.problem;
    piece.cache_row = problem.cu_seqlens_k.data != nullptr ? 0
                      : problem.cache_batch_idx.data != nullptr
                          ? static_cast<int>(clamped(problem.cache_batch_idx[sequence], 0, problem.k_batches - 1))
                          : sequence;
    piece.k_begin = span.k_begin;
    piece.first_slot = span.first_slot + block * plan.block;
    piece.end_slot = span.end_slot;
    piece.blocks = max(min(count * plan.item_blocks, span.blocks - block), 0);
    piece.begin = span.begin;
    piece.end = span.end;
    piece.whole_begin = span.whole_begin;
    piece.whole_end = span.whole_end;
    piece.new_slot = span.new_slot;
  }

  // Finds which CTAs have the other items of the piece's unit, and which of them merges.
  __device__ void divide(Piece& piece, const Span& span, int item, int count) const {
    const bool whole = count == span.items, ends = item + count == span.items;
    const int unit_start = at - item;
    if (p.plan.item_blocks > 1) {  // a slot for every item
      piece.slot = whole ? -1 : at;
      piece.merge = whole || !ends ? Piece::kNone : unit_start >= start ? Piece::kNow : Piece::kLast;
      piece.merge_first = unit_start;
      piece.merge_stride = 1;
      piece.merge_count = span.items;
    } else {
      const int cta = static_cast<int>(blockIdx.x);
      const int first = static_cast<int>(static_cast<unsigned>(unit_start) / static_cast<unsigned>(share));
      piece.slot = whole ? -1 : 2 * cta + (item == 0 ? 1 : 0);
      piece.merge = whole || !ends ? Piece::kNone : Piece::kLast;
      piece.merge_first = 2 * first;
      piece.merge_stride = 2;
      piece.merge_count = cta - first + 1;
    }
  }

  const Params& p;
  int share, start, at, end;
  int sequence = 0, in_sequence = 0;
};

}  // namespace heddle::cuda::sm90::attention_decode

// The warp that decides which tiles this CTA computes, and in which order, and announces them to the others.
#pragma once

#include <concepts>

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention/params.h"
#include "cuda/sm90/attention/positions.cuh"
#include "cuda/sm90/attention/work.cuh"

namespace heddle::cuda::sm90::attention {

// A tile as a number of rows down (in query tiles), a head unit and a sequence.
struct TileIndex {
  int q_tile, h, sequence;
};

// Equal lengths: tiles in sections of heads whose keys stay in the L2 cache; in each the last rows first: under a
// causal mask they have most keys, and short tiles at the end let all CTAs finish together.
__device__ inline TileIndex tile_of_batch(const Params& p, int tile) {
  const int size = p.section * p.q_tiles, first = tile / size * p.section, rest = tile % size;
  const int units = min(p.section, p.heads * p.B - first);
  const int unit = first + rest % units;
  return {p.q_tiles - 1 - rest / units, unit % p.heads, unit / p.heads};
}

// The number of the tile that comes at this place. Lists have any length. Kernels with score options have no registers
// for an order, and go as tiles are numbered.
template <class C>
__device__ inline int tile_at(const Params& p, int place) {
  if constexpr (!std::same_as<typename C::Walk, BandWalk<int>> && C::kOptions == 0) {
    if (p.order != nullptr) return p.order[place];
  }
  return place;
}

// The rows of packed sequence s among `rows`, whatever the offsets hold.
__device__ inline Interval<int> packed_rows(const int* cu_seqlens, int s, int rows) {
  const int begin = min(max(cu_seqlens[s], 0), rows);
  return {begin, min(max(cu_seqlens[s + 1], begin), rows)};
}

// Packed sequences: in sections too, of heads and of sequences that follow each other. In each the last rows of the
// longest first, then those of all its sequences that reach as far, and so on; within a row of tiles by sequence, then
// by head. The whole warp.
class PackedTiles {
 public:
  __device__ PackedTiles(const Params& params, int tile_rows, PackedPlace& place)
      : p(params), rows(tile_rows), at(place), lane(static_cast<int>(threadIdx.x) % 32) {}

  // Tiles only grow from call to call. q_tile < 0: there is no such tile.
  __device__ TileIndex find(int tile) {
    do {
      const int rank = (tile - at.first_tile) / at.heads;  // among the section's (row of tiles, sequence) pairs
      int q_tile = at.q_tile, chunk = at.chunk, before = at.before;
      for (; q_tile >= 0; --q_tile, chunk = at.begin) {
        for (; chunk < at.end; chunk += 32) {
          const int b = chunk + lane;
          const bool reaches = b < at.end && packed_rows(p.cu_seqlens_q, b, p.q_rows).size() > q_tile * rows;
          const unsigned all = __ballot_sync(0xffffffff, reaches);
          const int count = __popc(all);
          if (rank < before + count) {
            const bool it = reaches && before + __popc(all & ((1u << lane) - 1)) == rank;
            const int found = chunk + __ffs(__ballot_sync(0xffffffff, it)) - 1;
            keep(q_tile, chunk, before);
            return {q_tile, at.first_head + (tile - at.first_tile) % at.heads, found};
          }
          before += count;
        }
      }
      keep(q_tile, chunk, before);
    } while (next_section());
    return {-1, 0, 0};
  }

 private:
  // Lanes read the place together, and one of them writes it.
  __device__ void keep(int q_tile, int chunk, int before) {
    __syncwarp();
    if (lane == 0) {
      at.q_tile = q_tile;
      at.chunk = chunk;
      at.before = before;
    }
    __syncwarp();
  }

  // The next has as many sequences as have section_rows keys together, but one at least.
  __device__ bool next_section() {
    const bool all = at.end >= p.B;
    const int begin = all ? 0 : at.end, first_head = all ? at.first_head + at.heads : at.first_head;
    if (first_head >= p.heads) return false;
    const int first_key = p.cu_seqlens_k != nullptr ? packed_rows(p.cu_seqlens_k, begin, p.k_rows).begin : 0;
    int end = begin, longest = 0, fit = 32;
    while (fit == 32 && end < p.B) {
      const int b = end + lane;
      const bool fits =
          b < p.B && (b == begin || (p.cu_seqlens_k != nullptr
                                         ? packed_rows(p.cu_seqlens_k, b, p.k_rows).end - first_key <= p.section_rows
                                         : b - begin < p.section_rows / max(p.Sk, 1)));
      const unsigned others = ~__ballot_sync(0xffffffff, fits);
      fit = others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
      if (lane < fit) longest = max(longest, packed_rows(p.cu_seqlens_q, b, p.q_rows).size());
      end += fit;
    }
    longest = static_cast<int>(__reduce_max_sync(0xffffffff, static_cast<unsigned>(longest)));
    __syncwarp();  // all lanes have read the place: votes and sums across a warp do not order memory
    if (lane == 0) {
      at.first_tile += at.before * at.heads;
      at.first_head = first_head;
      at.heads = min(p.section, p.heads - first_head);
      at.begin = at.chunk = begin;
      at.end = end;
      at.q_tile = min((longest + rows - 1) / rows, p.q_tiles) - 1;
      at.before = 0;
    }
    __syncwarp();
    return true;
  }

  const Params& p;
  const int rows;
  PackedPlace& at;
  const int lane;
};

// Fills in what the other roles must know of a tile. One thread.
template <class C>
__device__ void describe_tile(const Params& p, const TileIndex& t, TileWork<typename C::Walk>& w) {
  const int rows = C::kConsumers * p.positions, s = t.sequence;
  int q_row = 0, k_row = 0, stored = p.Sq, keys = p.Sk;
  if (p.cu_seqlens_q != nullptr) {
    const Interval<int> packed = packed_rows(p.cu_seqlens_q, s, p.q_rows);
    q_row = packed.begin;
    stored = packed.end - packed.begin;
  }
  if (p.cu_seqlens_k != nullptr) {
    const Interval<int> packed = packed_rows(p.cu_seqlens_k, s, p.k_rows);
    k_row = packed.begin;
    keys = packed.end - packed.begin;
  }
  if constexpr (C::kOptions != 0) {  // as bounded_sequence() has it
    if (p.bias.data != nullptr || p.mask.data != nullptr) {
      stored = min(stored, p.Sq);
      keys = min(keys, p.Sk);
    }
  }
  const int used = p.seqused_q != nullptr ? min(max(p.seqused_q[s], 0), stored) : stored;
  if (p.seqused_k != nullptr) keys = min(max(min(p.seqused_k[s], keys) + p.k_appended, 0), keys);
  const int off = C::kIsPiece ? piece_off(p.piece, s) : p.top_left ? 0 : keys - used;
  const int position = t.q_tile * rows;
  w.position = position;
  w.h = t.h;
  w.sequence = s;
  w.q_row = q_row;
  w.rows = stored;
  w.used_rows = used;
  w.keys = keys;
  w.off = off;
  w.careful = w.spoiled = 0;
  // What its first and last row reach is cut to keys that are there once, not row by row: a CTA waits for its first
  // tile.
  const auto band = band_of<C>(p, off);
  const Interval<int> first = band.reach(position), last = band.reach(min(position + rows, used) - 1);
  const Interval<int> met = Interval<int>{first.begin, last.end}.common({0, position < used ? keys : 0});
  const bool all_used = min(position + rows, stored) <= used;  // else there are rows that meet no key
  BandWalk<int> walk(met, {last.begin, all_used ? first.end : 0}, C::kTileK);
  walk.mask_partial();
  w.walk = walk_of<typename C::Walk>(p.lists, p.lists.number(s, q_row, t.h, t.q_tile), walk);
  // A tile without keys is given one key tile behind the tensor's end, which arrives as zeros and is masked: so every
  // tile has a first step, which keeps the pipeline simple.
  w.k_row = w.walk.steps().empty() ? p.k_rows : k_row;
  w.walk.take_one_step();
}

// Where tiles differ in cost, p.next_tile deals them out as CTAs become free. Whoever claimed a tile while the one
// before has long to go would take it from a CTA that is free sooner, and heads would drift apart until the L2 cache
// cannot hold them: a CTA claims its next tile when the last but one is written out and few keys of the last are left.
template <class C, class Memory>
class Scheduler {
 public:
  __device__ Scheduler(const Params& params, Memory& memory)
      : p(params), shared(memory), first_lane(threadIdx.x % 32 == 0) {}

  // The whole warp; it calls announced(work) for each tile.
  template <class Announced>
  __device__ void run(const Announced& announced) {
    const int grid = static_cast<int>(gridDim.x), ahead = p.next_tile != nullptr ? 2 : kWorkSlots;
    int tile = static_cast<int>(blockIdx.x);
    for (;;) {
      const bool repeated = repeat();
      if (!repeated) {
        if (tile >= p.tiles) break;
        const TileIndex index = p.cu_seqlens_q != nullptr
                                    ? PackedTiles(p, C::kConsumers * p.positions, shared.packed_place).find(tile)
                                    : tile_of_batch(p, tile_at<C>(p, tile));
        if (index.q_tile < 0) break;
        if (first_lane) describe_tile<C>(p, index, shared.work[slot.index]);
      }
      const TileWork<Walk>& work = shared.work[slot.index];
      announce();
      announced(work);
      settle(ahead - 1);
      if (p.next_tile != nullptr) ptx::barrier_wait(shared.work_ending, ending_phase ^ 1);
      if (repeated) continue;
      if (p.next_tile != nullptr) {
        if (first_lane) tile = grid + atomicAdd(p.next_tile, 1);
        tile = __shfl_sync(0xffffffff, tile, 0);
      } else {
        tile += grid;
      }
    }
    if constexpr (C::kRepeatsTiles) repeat_last(announced);
    if (first_lane) shared.work[slot.index].position = kNoMoreTiles;
    announce();
  }

 private:
  using Walk = typename C::Walk;

  __device__ void announce() {
    if (first_lane) {
      const TileWork<Walk>& last = shared.work[(slot.index + kWorkSlots - 1) % kWorkSlots];
      const Interval<int> steps = last.walk.steps();
      shared.work[slot.index].first_number = last.first_number + static_cast<unsigned>(steps.end - steps.begin);
      ptx::barrier_arrive(shared.work_ready[slot.index]);
    }
    slot.next();
    ++pending;
    ending_phase ^= 1;
  }
  // Waits until all but `most` announced tiles are written out.
  __device__ void settle(int most) {
    for (; pending > most; --pending) {
      ptx::barrier_wait(shared.work_free[oldest.index], oldest.phase);
      oldest.next();
    }
  }
  // Whether the tile that was in this slot came out spoiled. The slot then holds it once more, as a careful one.
  __device__ bool repeat() {
    if constexpr (!C::kRepeatsTiles) return false;
    TileWork<Walk>& w = shared.work[slot.index];
    const bool spoiled = w.spoiled != 0;
    __syncwarp();
    if (!spoiled) return false;
    if (first_lane) {
      w.careful = 1;
      if constexpr (C::kGuessesMaxima) w.walk.mask_all();  // they are guessed where a tile is whole
      w.spoiled = 0;
    }
    return true;
  }
  __device__ void pause() {
    if (first_lane) {
      TileWork<Walk>& w = shared.work[slot.index];
      w.position = kPause;
      w.walk = {};
    }
    announce();
  }
  // Whether the last tiles are good is known only when they are written out. Consumers write a tile while they compute
  // the next, so a pause tells them not to wait for one.
  template <class Announced>
  __device__ void repeat_last(const Announced& announced) {
    pause();
    settle(0);
    bool any = false;
    for (const TileWork<Walk>& w : shared.work) any |= w.spoiled != 0;
    if (!any) return;
#pragma unroll 1
    for (int i = 0; i < kWorkSlots; ++i) {
      if (repeat()) {
        const TileWork<Walk>& work = shared.work[slot.index];
        announce();
        announced(work);
      } else {
        pause();
      }
    }
    settle(kWorkSlots - 1);
  }

  const Params& p;
  Memory& shared;
  const bool first_lane;
  RingPosition<kWorkSlots> slot, oldest;
  int pending = 0;
  std::uint32_t ending_phase = 0;  // of work_ending, for the next tile to be announced
};

}  // namespace heddle::cuda::sm90::attention

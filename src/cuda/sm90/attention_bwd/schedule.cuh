// Which keys a CTA computes the gradients of, and which query tiles meet them.
#pragma once

#include "cuda/common/attention/window.h"
#include "cuda/common/bounded_sequence.h"
#include "cuda/common/prefix_sum.cuh"
#include "cuda/sm90/attention_bwd/config.h"

namespace heddle::cuda::sm90::attention_bwd {

struct TileIndex {
  int tile, head, sequence;  // head: kv head and part; sequence < 0: there is no such tile
};

// This CTA's number in the order of work. For deterministic sums, where CTAs wait for those before them, that is the
// order in which they have started: whoever is waited for then runs. The whole warp.
__device__ inline int number_of_start(const Params& p) {
  int number = static_cast<int>(blockIdx.x);
  if (p.ticket != nullptr) {
    if (threadIdx.x == 0) number = atomicAdd(p.ticket, 1);
    number = __shfl_sync(0xffffffff, number, 0);
  }
  return number;
}

// Equal lengths: in sections of heads whose rows stay in the L2 cache.
//
// In each the first keys first, which a causal mask leaves most rows. Deterministic sums: tiles that meet a query tile
// take turns, and wait only for tiles that started before them or that start without waiting for them. Where a band
// makes each tile of keys begin at another query tile, the last tiles get there first, so they go first. Without, all
// would begin with the same query tile; so the tiles of a chunk begin at different ones and go round, and all of a
// chunk run at once: it has fewer than there are multiprocessors.
__device__ inline TileIndex tile_of_batch(const Params& p, int tile) {
  const int size = p.section * p.k_tiles, first = tile / size * p.section, rest = tile % size;
  const int units = min(p.section, p.units - first), heads = static_cast<int>(p.problem.Hkv) * p.parts;
  int unit = first + rest % units, at = rest / units;
  if (p.turns != nullptr && p.chunk == 0) at = p.k_tiles - 1 - at;
  if (p.turns != nullptr && p.chunk > 0) {
    const int chunk = rest / (units * p.chunk), of_chunk = rest - chunk * units * p.chunk;
    const int length = min(p.chunk, p.k_tiles - chunk * p.chunk);
    unit = first + of_chunk / length;
    at = chunk * p.chunk + of_chunk % length;
  }
  return {at, unit % heads, unit / heads};
}

// Packed keys: by sequence, then by head, then by tile. The whole warp.
template <class C>
__device__ TileIndex tile_of_packed(const Params& p, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, heads = static_cast<int>(p.problem.Hkv) * p.parts;
  const int batch = static_cast<int>(p.problem.B);
#pragma unroll 1
  for (int from = 0; from < batch; from += 32) {
    const int b = from + lane;
    const int rows = b < batch ? static_cast<int>(p.problem.stored_sequence(b).k_rows) : 0;
    const int tiles = (rows + C::kTileK - 1) / C::kTileK * heads;
    const int before = sum_through_lane(tiles, lane);  // of the sequences up to this lane's
    const unsigned reaches = __ballot_sync(0xffffffff, tile < before);
    if (reaches != 0) {
      const int owner = __ffs(static_cast<int>(reaches)) - 1;
      const int first = __shfl_sync(0xffffffff, before - tiles, owner);
      const int of_head = __shfl_sync(0xffffffff, tiles, owner) / heads, rest = tile - first;
      const int at = rest % of_head;
      return {p.turns != nullptr && p.chunk == 0 ? of_head - 1 - at : at, rest / of_head, from + owner};
    }
    tile -= __shfl_sync(0xffffffff, before, 31);
  }
  return {0, 0, -1};
}

// The steps of a tile of keys: all of `band`, or what a list names of it. Of the band's walk nothing is kept, since
// index() is all that is asked later, and needs nothing.
__device__ inline Interval<int> set_walk(const Params&, const Work&, const TileIndex&, const BandWalk<int>& band,
                                         BandWalk<int>&) {
  return band.steps();
}
template <int kPartBits>
__device__ Interval<int> set_walk(const Params& p, const Work& w, const TileIndex& at, const BandWalk<int>& band,
                                  ListWalk<int, kPartBits>& walk) {
  walk = walk_of<ListWalk<int, kPartBits>>(p.lists, p.lists.number(w.sequence, w.k_row, at.head, at.tile), band);
  return walk.steps();
}

// Keys of a tile that a step is about: [begin, end) of it. All, unless its list has parts: then each bit stands for as
// many.
template <class C>
__device__ Interval<int> keys_of_step(const typename C::Walk& walk, int step) {
  if constexpr (C::kHasParts) {
    static_assert(C::kTileK == kConsumers * kKeys);
    const int parts = walk.parts(step);
    return {(parts & 1) != 0 ? 0 : kKeys, (parts & 2) != 0 ? C::kTileK : kKeys};
  } else {
    return {0, C::kTileK};
  }
}

// The keys that some row of a listed tile meets, a bit each: others may hold anything. The whole warp.
template <class C>
__device__ void mark_met_keys(const Params& p, const TileWork<typename C::Walk>& w,
                              std::uint32_t (&met_keys)[C::kTileK / 32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t met[C::kTileK / 32] = {};
  const BasicBand<int> band{
      .off = w.off, .left = p.left, .right = p.right, .rows = w.sq, .keys = w.first_key + max(w.keys, 0)};
#pragma unroll 1
  for (int base = w.first_step; base < w.first_step + w.steps; base += 32) {
    const int step = base + lane;
    Interval<int> keys{};
    if (step < w.first_step + w.steps) {
      const int row = w.walk.index(step) * C::kTileQ;
      const Interval<int> of_rows = band.keys_of(Interval<int>{row, row + C::kTileQ});
      keys = keys_of_step<C>(w.walk, step).common({of_rows.begin - w.first_key, of_rows.end - w.first_key});
    }
    std::uint32_t others = 0;
#pragma unroll
    for (int n = 0; n < C::kTileK / 32; ++n) {
      const int begin = max(keys.begin - 32 * n, 0), end = min(keys.end - 32 * n, 32);
      const std::uint32_t mine = begin < end ? (0xffffffffu >> (32 - (end - begin))) << begin : 0;
      met[n] |= __reduce_or_sync(0xffffffff, mine);
      others |= ~met[n];
    }
    if (others == 0) break;  // most tiles of most lists: each row of the first steps meets all keys
  }
  if (lane == 0) {
#pragma unroll
    for (int n = 0; n < C::kTileK / 32; ++n) met_keys[n] = met[n];
  }
}

// The whole warp; its first lane writes w. False: there is nothing to do, or this is another lane.
template <class C>
__device__ bool find_work(const Params& p, int tile, TileWork<typename C::Walk>& w) {
  const AttentionBackwardProblem& problem = p.problem;
  const TileIndex at = problem.cu_seqlens_k.data != nullptr ? tile_of_packed<C>(p, tile) : tile_of_batch(p, tile);
  const bool takes_turns =
      p.turns != nullptr && __all_sync(0xffffffff, any::attention_bwd_rows::lie_apart(problem, threadIdx.x % 32, 32));
  if (at.sequence < 0 || threadIdx.x % 32 != 0) return false;
  const Sequence s = bounded(problem, problem.sequence(at.sequence), false);
  const int sq = static_cast<int>(s.sq), sk = static_cast<int>(s.sk);
  // Sequences and windows of a piece are so short that farther apart no pair changes sides.
  const int off = static_cast<int>(clamped(s.off, -kOpen / 2, kOpen / 2));
  w.first_key = at.tile * C::kTileK;
  w.stored_keys = min(static_cast<int>(s.k_rows) - w.first_key, C::kTileK);
  if (w.stored_keys <= 0) return false;
  w.takes_turns = takes_turns;
  w.sequence = at.sequence;
  w.kv_head = at.head / p.parts;
  w.part = at.head % p.parts;
  w.heads = static_cast<int>(problem.G) / p.parts;
  w.head = at.head * w.heads;
  w.key_sums_row = static_cast<int>(first_key_row(problem, at.sequence, s));
  w.q_batch = problem.cu_seqlens_q.data != nullptr ? 0 : at.sequence;
  w.k_batch = problem.cu_seqlens_k.data != nullptr ? 0 : at.sequence;
  w.q_row = static_cast<int>(s.q_begin);
  w.k_row = static_cast<int>(s.k_begin);
  w.statistics_row = static_cast<int>(any::attention_bwd_rows::first_row(problem, at.sequence, s));
  w.sq = sq;
  w.off = off;
  // Keys that no row attends are treated as keys beyond the length: they may hold anything, and are cleared.
  const int end = p.right == kOpen ? sk : min(sk, sq + off + p.right);
  w.keys = max(min(end - w.first_key, C::kTileK), 0);
  w.begin = min(max(off - p.left - w.first_key, 0), w.keys);
  const BasicBand<int> band{.off = off, .left = p.left, .right = p.right, .rows = sq, .keys = sk};
  const Interval<int> keys{w.first_key, w.first_key + C::kTileK};
  const Interval<int> steps = set_walk(p, w, at, {band.transposed(), keys, band.all_rows(), C::kTileQ}, w.walk);
  w.first_step = steps.begin;
  w.steps = steps.size();
  w.start = w.first_step;
  w.first_row = p.right == kOpen ? 0 : max(-off - p.right, 0);
  w.last_row = p.left == kOpen ? sq : min(sq, sk + p.left - off);
  w.clears_end = s.q_begin + w.last_row < problem.q_rows;
  if (p.turns != nullptr) {
    const int tiles = (max(end, 0) + C::kTileK - 1) / C::kTileK;
    w.tile = at.tile;
    w.last_key = tiles - 1;
    w.chunk = 0;
    if (p.chunk > 0) {
      w.chunk_first = at.tile / p.chunk * p.chunk;
      w.chunk = max(min(p.chunk, tiles - w.chunk_first), 1);
      w.place = at.tile - w.chunk_first;
      w.start = w.first_step + w.place * w.steps / w.chunk;
    }
  }
  return true;
}

// How many tiles of keys add to this query tile before this one does. Lists without places must have all tiles of the
// band.
template <class C>
__device__ inline int place_in_order(const Params& p, const TileWork<typename C::Walk>& w, int step) {
  if constexpr (C::kListed) {
    if (p.lists.places != nullptr) return p.lists.places[w.walk.entry(step) - p.lists.tiles];
  }
  const int query_tile = w.walk.index(step);
  if (w.chunk > 0) {
    // The tile that begins here, or last before, comes first; then those that began before it, the last one first.
    const int owner = min(((query_tile + 1) * w.chunk + w.steps - 1) / w.steps, w.chunk) - 1, after = owner - w.place;
    return w.chunk_first + (after < 0 ? after + w.chunk : after);
  }
  const int last_row = min((query_tile + 1) * C::kTileQ, w.sq) - 1;
  const int last = p.right == kOpen ? w.last_key : min((last_row + w.off + p.right) / C::kTileK, w.last_key);
  return last - w.tile;
}

// The query tiles that a CTA walks over: of its heads, one after the other.
template <class Walk>
struct QueryTiles {
  int step, head, left;  // left: with this one

  __device__ explicit QueryTiles(const TileWork<Walk>& work)
      : step(work.start), head(work.head), left(work.steps * work.heads), w(work) {}
  __device__ int tile() const { return w.walk.index(step); }
  __device__ void next() {
    --left;
    if (++step == w.first_step + w.steps) step = w.first_step;
    if (step == w.start) ++head;
  }

 private:
  const TileWork<Walk>& w;
};

}  // namespace heddle::cuda::sm90::attention_bwd

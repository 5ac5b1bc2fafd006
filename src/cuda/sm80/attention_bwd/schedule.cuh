// Which CTA has which keys.
#pragma once

#include "cuda/any/bounded_piece.h"
#include "cuda/common/attention/window.h"
#include "cuda/sm80/attention_bwd/config.h"
#include "cuda/sm80/attention_bwd/params.h"

namespace heddle::cuda::sm80::attention_bwd {

using attention::band_of;

// The steps of a tile of keys: all of `band`, or what a list names of it. Of the band's walk nothing is kept, since
// index() is all that is asked later, and needs nothing.
__device__ inline Interval<int> set_walk(const Params&, const Work&, int /*k_tile*/, const BandWalk<int>& band,
                                         BandWalk<int>&) {
  return band.steps();
}
__device__ inline Interval<int> set_walk(const Params& p, const Work& w, int k_tile, const BandWalk<int>& band,
                                         ListWalk<int>& walk) {
  const std::int64_t list = (std::int64_t{w.scores.b} * p.kv_heads.divisor + w.kv_head) * p.k_tiles + k_tile;
  walk = {p.scores.lists.tiles + list * p.scores.lists.length, p.scores.lists.counts[list], band};
  return walk.steps();
}

// What is known of a sequence and a head before a key tile is chosen.
template <class C>
__device__ inline TileWork<typename C::Walk> describe_sequence(const Params& p, int b, int kv_head) {
  const AttentionProblem& a = p.scores.problem;
  const Sequence s = any::bounded_piece(a, b);
  TileWork<typename C::Walk> w{};
  w.kv_head = kv_head;
  w.first_head = kv_head * static_cast<int>(p.scores.group.divisor);
  w.heads = static_cast<int>(p.scores.group.divisor);
  w.scores.b = b;
  w.scores.h = w.first_head;
  w.scores.q_rows = static_cast<int>(s.q_rows);
  w.scores.sq = static_cast<int>(s.sq);
  // Of a piece's row 0 from its key 0: farther than kMaxPiece no pair changes sides.
  w.scores.off = static_cast<int>(clamped(s.off, -kOpen / 2, kOpen / 2));
  w.far = static_cast<int>(s.off - w.scores.off);
  w.key_offset = static_cast<int>(s.key_offset);
  w.scores.q_row = static_cast<int>(s.q_begin);
  w.scores.k_slot = static_cast<int>(s.k_begin);
  w.scores.sk = static_cast<int>(s.sk);
  w.k_rows = static_cast<int>(s.k_rows);
  const BasicBand<int> band = band_of(p.scores, w.scores);
  w.met = band.keys_of(band.all_rows());
  w.stored_row = any::attention_bwd_rows::first_row(a, b, s);
  constexpr std::int64_t kBytes = sizeof(typename C::Element);
  const auto key0 = [&](const Operand& x) {
    return x.data + kBytes * (b * x.stride_b + s.k_begin * x.stride_s + kv_head * x.stride_h);
  };
  w.k = key0(a.k);
  w.v = key0(a.v);
  return w;
}

// rows: among which those that meet the tile's keys are walked over.
template <class C>
__device__ inline void choose_keys(const Params& p, int k_tile, Interval<int> rows, TileWork<typename C::Walk>& w) {
  w.first_key = k_tile * C::kTileK;
  const BandWalk<int> band(band_of(p.scores, w.scores).transposed(), {w.first_key, w.first_key + C::kTileK}, rows,
                           C::kTileQ);
  w.steps = set_walk(p, w, k_tile, band, w.walk);
}

// Tiles in sections of heads whose rows stay in the L2 cache. In each, under a causal mask the first keys have most
// rows and come first, so that short tiles at the end let all multiprocessors finish together. Where key tiles take
// turns at the rows, those come first that add first: a CTA waits only for CTAs that have started.
template <class C>
__device__ inline TileWork<typename C::Walk> describe_work(const Params& p) {
  const unsigned index = p.ticket != nullptr ? atomicAdd(p.ticket, 1) : blockIdx.x;
  const unsigned section = p.section_tiles.quotient(index), rest = index - section * p.section_tiles.divisor;
  const unsigned from_unit = section * p.section.divisor, units = min(p.section.divisor, p.units - from_unit);
  const unsigned row = units == p.section.divisor ? p.section.quotient(rest) : rest / units;
  const unsigned unit = from_unit + rest - row * units, group = p.splits.quotient(unit), b = p.kv_heads.quotient(group);
  TileWork<typename C::Walk> w =
      describe_sequence<C>(p, static_cast<int>(b), static_cast<int>(group - b * p.kv_heads.divisor));
  const int before = static_cast<int>(unit - group * p.splits.divisor) * p.split_heads;
  w.unit = static_cast<int>(unit);
  w.first_head += before;
  w.heads = min(p.split_heads, w.heads - before);
  const int k_tile = p.last_keys_first ? p.k_tiles - 1 - static_cast<int>(row) : static_cast<int>(row);
  choose_keys<C>(p, k_tile, {0, w.scores.sq}, w);
  return w;
}

// How many key tiles add to a query tile before this one does: those with later keys. Of the band: what takes turns
// and walks over lists must have all of its tiles in them.
template <class C>
__device__ inline int turn_of(const Params& p, const Work& w, int q_tile) {
  const int last = min((q_tile + 1) * C::kTileQ, w.scores.sq) - 1, at = last + w.scores.off;
  const int end =
      p.scores.stepped ? band_of(p.scores, w.scores).keys_of(last).end : min(at + p.scores.right + 1, w.scores.sk);
  return (end + C::kTileK - 1) / C::kTileK - 1 - w.first_key / C::kTileK;
}

}  // namespace heddle::cuda::sm80::attention_bwd

// Which CTA computes what.
#pragma once

#include "cuda/any/bounded_piece.h"
#include "cuda/common/attention/window.h"
#include "cuda/sm80/attention_fwd/config.h"

namespace heddle::cuda::sm80::attention_fwd {

// Of a piece's row 0 from its key 0: beyond that no pair changes sides (kMaxPiece).
constexpr std::int64_t kFarthest = kOpen / 2;

// Tiles in sections of heads whose keys stay in the L2 cache; in each the last rows first: under a causal mask they
// have most keys, and short tiles at the end let all multiprocessors finish together.
template <class C>
__device__ inline TileWork<typename C::Walk> describe_work(const Params& p) {
  // Divisions would take most of this function's time, so all but one are by Divisors that the host prepared. That one
  // is for a last section with fewer heads than the others.
  const unsigned tile = blockIdx.x, section = p.section_tiles.quotient(tile);
  const unsigned rest = tile - section * p.section_tiles.divisor, from_unit = section * p.section.divisor;
  const unsigned left_over = p.units - from_unit, units = min(p.section.divisor, left_over);
  const unsigned row = units == p.section.divisor ? p.section.quotient(rest) : rest / units;
  const unsigned unit = from_unit + rest - row * units, b = p.heads.quotient(unit);
  TileWork<typename C::Walk> w;
  w.b = static_cast<int>(b);
  w.h = static_cast<int>(unit - b * p.heads.divisor);
  w.first = (p.q_tiles - 1 - static_cast<int>(row)) * C::kTileQ;
  const Sequence s = any::bounded_piece(p.problem, w.b);
  w.sk = static_cast<int>(Int8Qk<C> ? any::attention_int8_qk::keys_of(p.problem, s) : s.sk);
  w.q_rows = static_cast<int>(s.q_rows);
  w.sq = static_cast<int>(s.sq < s.q_rows ? s.sq : s.q_rows);
  w.off = static_cast<int>(clamped(s.off, -kFarthest, kFarthest));
  w.far = static_cast<int>(s.off - w.off);
  w.key_offset = static_cast<int>(s.key_offset);
  w.q_row = static_cast<int>(s.q_begin);
  w.k_slot = static_cast<int>(s.k_begin);
  const auto key0 = [&](const Operand& x, std::int64_t element_bytes) {
    const std::int64_t head = p.group.quotient(w.h) * x.stride_h;
    if (p.problem.page_table.data != nullptr) return x.data + element_bytes * head;
    const std::int64_t b = p.problem.key_slot(w.b, s, 0).batch;
    return x.data + element_bytes * (head + b * x.stride_b + s.k_begin * x.stride_s);
  };
  w.k = key0(Int8Qk<C> ? p.codes.k : p.problem.k, sizeof(typename C::QkElement));
  w.v = key0(p.problem.v, sizeof(typename C::Element));
  const Interval<int> rows{w.first, w.first + C::kTileQ};
  BandWalk<int> band(attention::band_of(p, w), rows, {0, w.sk}, C::kTileK);
  band.mask_partial();
  // With score options, rows that do not exist have all their keys masked, so that no bias or mask is read for them.
  if (C::kScoreOptions && rows.end > w.sq) band.mask_all();
  const std::int64_t list = (std::int64_t{w.b} * p.heads.divisor + w.h) * p.q_tiles + w.first / C::kTileQ;
  w.walk = walk_of<typename C::Walk>(p.lists, list, band);
  return w;
}

}  // namespace heddle::cuda::sm80::attention_fwd

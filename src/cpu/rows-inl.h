// Query rows in vector lanes: gathering Q^T, each row's keys, and scattering O.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/plan.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// One query row of a kv head's G * Sq: its position and its query head.
struct Row {
  std::int64_t i, h;
};
inline Row row_at(const AttentionProblem& p, std::int64_t kv_head, std::int64_t row) {
  return {row / p.G, kv_head * p.G + row % p.G};
}

// One register tile's worth of query rows: what its scores need besides Q.
struct GroupRows {
  std::int64_t begin = 0, count = 0;       // rows [begin, begin + count) of the kv head, or, if there is a list,
  const std::int32_t* listed = nullptr;    // begin + listed[0], begin + listed[1], ...
  int vectors = 0;                         // lanes used, in vectors
  KeyRange keys;                           // from the first to the last that some row meets in the band
  KeyRange unmasked;                       // those that every row meets
  std::int32_t low[kGroup], high[kGroup];  // row's keys: low <= j < high
  float slope[kGroup], position[kGroup];   // ALiBi: slope >= 0 or not, i + off
  // Listed rows under masks, [words][kGroup]: bit j % 32 of word j / 32 is key keys.begin + j. Null: they meet them
  // all.
  const std::uint32_t* masks = nullptr;

  bool masked(std::int64_t lane, std::int64_t key) const {
    const std::int64_t j = key - keys.begin;
    return masks != nullptr && (masks[j / 32 * kGroup + lane] >> (j % 32) & 1u) == 0;
  }
};

inline Row row_of(const AttentionProblem& p, std::int64_t kv_head, const GroupRows& g, std::int64_t lane) {
  return row_at(p, kv_head, g.begin + (g.listed == nullptr ? lane : g.listed[lane]));
}

// Rows of f32 that pass through a line of memory at a time: four are transposed, and panels take kDepth of them.
template <Unit U>
constexpr std::int64_t kLineRows = HWY_MAX(4, U::kDepth);

// Rows are far apart in memory and each is touched once: fetched this many rows before their use.
constexpr std::int64_t kRowsAhead = 12;

// Fetches rows [lane, lane + 4) + kRowsAhead of a tile, for writing if kWrite.
template <int kWrite>
HWY_INLINE void FetchRows(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t b,
                          const Sequence& s, std::int64_t kv_head, const GroupRows& g, std::int64_t lane) {
  if (x.stride_d != 1) return;
  for (std::int64_t r = lane + kRowsAhead; r < std::min(lane + kRowsAhead + 4, g.count); ++r) {
    const Row row = row_of(p, kv_head, g, r);
    const std::byte* at = x.at(b, s.q_begin + row.i, row.h);
    for (std::int64_t n = 0; n < width * static_cast<std::int64_t>(size_of(x.dtype)); n += 64) {
      __builtin_prefetch(at + n, kWrite, 3);
    }
  }
}

// Writes the group's rows of x (a [.., H, width] operand with q's rows) as columns: out[d][lane],
// lanes `ld` apart, d padded to `padded` with zeros, lanes padded to `lanes`; a word holds neighbouring d. line: 4 *
// padded f32.
template <Unit U>
void GatherRowsTransposed(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded,
                          std::int64_t b, const Sequence& s, std::int64_t kv_head, const GroupRows& g,
                          std::int64_t lanes, typename U::Word* HWY_RESTRICT out, std::int64_t ld,
                          float* HWY_RESTRICT line) {
  using Word = typename U::Word;
  Word* words = reinterpret_cast<Word*>(line);
  const std::int64_t row_words = Words<U>(padded);
  for (std::int64_t lane = 0; lane < lanes; lane += 4) {
    FetchRows<0>(p, x, width, b, s, kv_head, g, lane);
    for (std::int64_t k = 0; k < 4; ++k) {
      Word* to = words + k * row_words;
      const Row row = lane + k < g.count ? row_of(p, kv_head, g, lane + k) : Row{s.sq, 0};
      if (row.i >= s.sq) {  // rows that are not used may hold anything
        std::memset(to, 0, static_cast<std::size_t>(row_words) * sizeof(Word));
        continue;
      }
      U::PackRow(x, x.at(b, s.q_begin + row.i, row.h), width, padded, reinterpret_cast<typename U::Element*>(to));
    }
    for (std::int64_t d = 0; d < row_words; d += 4) Transpose4x4(words + d, row_words, out + d * ld + lane, ld);
  }
}

// Writes a row of x, rounded to its dtype, or adds to it, in f32.
inline void PutRow(const float* HWY_RESTRICT from, std::int64_t count, std::byte* to, const Operand& x, bool add) {
  if (!add) return StoreRow(from, count, to, x.dtype, x.stride_d);
  auto* sums = reinterpret_cast<float*>(to);
  for (std::int64_t d = 0; d < count; ++d) sums[d * x.stride_d] += from[d];
}

// The reverse for f32: columns in[d][lane] to rows of x, rounded to its dtype or added to it.
inline void ScatterRows(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded,
                        std::int64_t b, const Sequence& s, std::int64_t kv_head, const GroupRows& g,
                        const float* HWY_RESTRICT in, std::int64_t ld, float* HWY_RESTRICT line, bool add = false) {
  for (std::int64_t lane = 0; lane < g.count; lane += 4) {
    FetchRows<1>(p, x, width, b, s, kv_head, g, lane);
    for (std::int64_t d = 0; d < padded; d += 4) Transpose4x4(in + d * ld + lane, ld, line + d, padded);
    for (std::int64_t k = 0; k < 4 && lane + k < g.count; ++k) {
      const Row row = row_of(p, kv_head, g, lane + k);
      PutRow(line + k * padded, width, x.at(b, s.q_begin + row.i, row.h), x, add);
    }
  }
}

// Fills `g` for rows [begin, begin + count); lanes beyond count copy the widest range, so that they never force a mask.
// listed: then rows begin + listed[0] and so on, which meet `keys` at most, as a tile that is to be masked, of them
// those that `masks` says.
inline void PrepareRows(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t kv_head,
                        std::int64_t begin, std::int64_t count, GroupRows& g, const std::int32_t* listed = nullptr,
                        KeyRange keys = {}, const std::uint32_t* masks = nullptr) {
  const Band band = p.band(s);
  g.begin = begin;
  g.count = count;
  g.listed = listed;
  g.masks = masks;
  g.vectors = static_cast<int>(ceil_div(count, kLanes));
  if (listed == nullptr) {
    const Interval<std::int64_t> positions = positions_of(p, {begin, begin + count});
    g.keys = band.keys_of(positions);
    // Rows that are stored but not used meet no key.
    g.unmasked = band.all_rows().holds(positions) ? band.keys_of_each(positions) : KeyRange{};
  } else {
    g.keys = keys;
    g.unmasked = {};
  }
  for (std::int64_t lane = 0; lane < count; ++lane) {
    const Row row = row_of(p, kv_head, g, lane);
    const KeyRange met = row.i < s.sq ? band.keys_of(row.i) : KeyRange{};
    g.low[lane] = static_cast<std::int32_t>(met.begin);
    g.high[lane] = static_cast<std::int32_t>(met.end);
    g.position[lane] = static_cast<float>(row.i + s.off);
    g.slope[lane] = p.alibi ? p.alibi.as<const float>()[p.alibi.offset(b, row.h, 0)] : 0.0f;
  }
  for (std::int64_t lane = count; lane < kGroup; ++lane) {
    g.low[lane] = static_cast<std::int32_t>(g.keys.begin);
    g.high[lane] = static_cast<std::int32_t>(g.keys.end);
    g.position[lane] = 0.0f;
    g.slope[lane] = 0.0f;
  }
}

// What a group works on in one tile of keys.
template <Unit U>
struct TilePart {
  std::int64_t tile;         // the tile's first key
  KeyRange keys;             // those of it that the group needs
  std::int64_t first, last;  // these in whole steps of kPad, counted from the tile's first
  bool unmasked;             // all rows meet all keys of the steps

  TilePart(const GroupRows& g, KeyRange of)
      : tile(of.begin),
        keys(of.common(g.keys)),
        first((keys.begin - tile) / U::kPad * U::kPad),
        last(round_up(keys.end - tile, U::kPad)),
        unmasked(g.unmasked.holds({tile + first, tile + last})) {}
  bool empty() const { return keys.empty(); }
  // Words of the keys where they are summed: exactly those that the group needs (in whole steps of the product), so
  // that a value that no row attends is not even multiplied by 0.
  Interval<std::int64_t> depth() const { return DepthWords<U>({keys.begin - tile, keys.end - tile}); }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

// From products q.k to logits: scale, softcap, ALiBi, bias, masks; and dropout of the probabilities. Tiles are
// S^T[key][lane], rows of kGroup f32.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/dtypes.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/simd-inl.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"
#include "problem/philox.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// One kv head of one sequence.
struct Head {
  const AttentionProblem& p;
  std::int64_t b, kv_head;
  const Sequence& s;
};

// Something is added to the logits, or taken off. They are kept as they are then: a mask's finite stand-in for minus
// infinity (the lowest float32, say) leaves no room for a factor. Where nothing is, they are kept times log2(e), which
// saves exp2 a product for each.
inline bool natural_logits(const AttentionProblem& p) { return p.has_planes() || p.alibi || p.softcap > 0; }
// What makes a kept logit of a natural one.
inline float to_kept(const AttentionProblem& p) { return natural_logits(p) ? 1.0f : kLog2e; }
// What makes powers of two of differences of kept logits.
inline float to_log2(const AttentionProblem& p) { return natural_logits(p) ? kLog2e : 1.0f; }

// Anything beyond scale and key ranges changes the logits.
inline bool has_score_options(const AttentionProblem& p) { return natural_logits(p) || !(p.scale > 0); }

// extra[key][lane] = bias, -inf where the mask removes the pair; keys [begin, begin + count).
inline void LoadBiasAndMask(const Head& head, const GroupRows& g, std::int64_t begin, std::int64_t count,
                            float* HWY_RESTRICT extra) {
  const AttentionProblem& p = head.p;
  // Keys are padded; those from sk on have neither bias nor mask.
  const std::int64_t end = std::min(begin + count, head.s.sk);
  for (std::int64_t lane = 0; lane < static_cast<std::int64_t>(g.vectors) * kLanes; ++lane) {
    if (lane >= g.count) {
      for (std::int64_t j = 0; j < count; ++j) extra[j * kGroup + lane] = 0.0f;
      continue;
    }
    const Row row = row_of(p, head.kv_head, g, lane);
    if (row.i >= head.s.sq) {  // not used: its bias may lie anywhere
      for (std::int64_t j = 0; j < count; ++j) extra[j * kGroup + lane] = 0.0f;
      continue;
    }
    for (std::int64_t j = begin; j < begin + count; ++j) {
      float value = 0.0f;
      if (j < end) {
        const std::int64_t column = head.s.key_offset + j;
        if (p.bias) value = load_element(p.bias.data, p.bias.dtype, p.bias.offset(head.b, row.h, row.i, column));
        if (p.mask && p.mask.as<const std::uint8_t>()[p.mask.offset(head.b, row.h, row.i, column)] == 0)
          value = -kInfinity;
        if (p.draft_removes(head.b, head.s, row.i, j)) value = -kInfinity;
      }
      extra[(j - begin) * kGroup + lane] = value;
    }
  }
}

// Of a tile of logits as FinishScores() has it, removes what the masks of listed rows do; of vector n. Returns the
// maxima of `top` and what is left.
inline VF RemoveMasked(const GroupRows& g, int n, std::int64_t begin, std::int64_t count, float* HWY_RESTRICT tile,
                       std::int64_t ld, VF top) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t key = begin + j - g.keys.begin;
    const auto word = hn::LoadU(du, g.masks + key / 32 * kGroup + n * kLanes);
    const auto kept = hn::RebindMask(d, hn::TestBit(word, hn::Set(du, 1u << (key % 32))));
    float* at = tile + j * ld + n * kLanes;
    const VF x = hn::IfThenElse(kept, hn::LoadU(d, at), hn::Set(d, -kInfinity));
    hn::StoreU(x, d, at);
    top = hn::Max(top, x);
  }
  return top;
}

// tile: raw products of keys [begin, begin + count) -> logits as they are kept, -inf where a pair is removed. max[n]:
// running maxima. extra: count * kGroup f32 if p.has_planes(). ld: distance of the tile's rows.
inline void FinishScores(const Head& head, const GroupRows& g, std::int64_t begin, std::int64_t count,
                         float* HWY_RESTRICT tile, std::int64_t ld, float* HWY_RESTRICT extra, VF* max) {
  const DF d;
  const DI di;
  const AttentionProblem& p = head.p;
  const bool planes = p.has_planes();
  if (planes) LoadBiasAndMask(head, g, begin, count, extra);
  const VF minus_infinity = hn::Set(d, -kInfinity);
  const VF cap = hn::Set(d, p.softcap);
  const VF to_tanh = hn::Set(d, p.softcap > 0 ? p.scale / p.softcap : 0.0f);
  const VF scale = hn::Set(d, natural_logits(p) ? p.scale : p.scale * kLog2e);
  for (int n = 0; n < g.vectors; ++n) {
    const VI low = hn::LoadU(di, g.low + n * kLanes), high = hn::LoadU(di, g.high + n * kLanes);
    const VF slope = hn::LoadU(d, g.slope + n * kLanes), position = hn::LoadU(d, g.position + n * kLanes);
    VF top = max[n];
    for (std::int64_t j = 0; j < count; ++j) {
      float* at = tile + j * ld + n * kLanes;
      VF x = hn::LoadU(d, at);
      x = p.softcap > 0 ? hn::Mul(cap, Tanh(hn::Mul(x, to_tanh))) : hn::Mul(x, scale);
      if (p.alibi) {
        const VF distance = hn::Abs(hn::Sub(position, hn::Set(d, static_cast<float>(begin + j))));
        x = hn::NegMulAdd(slope, distance, x);
      }
      if (planes) {
        const VF e = hn::LoadU(d, extra + j * kGroup + n * kLanes);
        x = hn::IfThenElse(hn::Eq(e, minus_infinity), minus_infinity, hn::Add(x, e));
      }
      const VI key = hn::Set(di, static_cast<std::int32_t>(begin + j));
      const auto inside = hn::AndNot(hn::Gt(low, key), hn::Gt(high, key));
      x = hn::IfThenElse(hn::RebindMask(d, inside), x, minus_infinity);
      hn::StoreU(x, d, at);
      top = hn::Max(top, x);
    }
    max[n] = g.masks == nullptr ? top : RemoveMasked(g, n, begin, count, tile, ld, max[n]);
  }
}

// factors[key][lane] = 1 / (1 - p) if the pair is kept, else 0.
inline void DropoutFactors(const Head& head, const GroupRows& g, std::int64_t begin, std::int64_t count,
                           float* HWY_RESTRICT factors) {
  const AttentionProblem& p = head.p;
  const float keep = 1.0f / (1.0f - p.dropout.p);
  const std::uint32_t threshold = dropout_threshold(p.dropout.p);
  for (std::int64_t lane = 0; lane < kGroup; ++lane) {
    if (lane >= g.count) {
      for (std::int64_t j = 0; j < count; ++j) factors[j * kGroup + lane] = 0.0f;
      continue;
    }
    const Row row = row_of(p, head.kv_head, g, lane);
    const auto h = static_cast<std::uint32_t>(head.b * p.H + row.h);
    std::array<std::uint32_t, 4> words{};
    const auto i = static_cast<std::uint32_t>(head.s.q_offset + row.i);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t j = head.s.key_offset + begin + k;
      if (k == 0 || j % 4 == 0) words = dropout_words(p.dropout, h, i, static_cast<std::uint32_t>(j / 4));
      factors[k * kGroup + lane] = words[j % 4] >= threshold ? keep : 0.0f;
    }
  }
}

// attended[j] = whether any row of the group may attend key begin + j.
inline void AttendedKeys(const Head& head, const GroupRows& g, std::int64_t begin, std::int64_t count, bool* attended) {
  const AttentionProblem& p = head.p;
  for (std::int64_t j = begin; j < begin + count; ++j) {
    bool any = false;
    for (std::int64_t lane = 0; lane < g.count && !any; ++lane) {
      if (j < g.low[lane] || j >= g.high[lane] || g.masked(lane, j)) continue;
      const Row row = row_of(p, head.kv_head, g, lane);
      const std::int64_t column = head.s.key_offset + j;
      if (p.mask && p.mask.as<const std::uint8_t>()[p.mask.offset(head.b, row.h, row.i, column)] == 0) continue;
      if (p.bias && load_element(p.bias.data, p.bias.dtype, p.bias.offset(head.b, row.h, row.i, column)) == -kInfinity)
        continue;
      if (p.draft_removes(head.b, head.s, row.i, j)) continue;
      any = true;
    }
    attended[j - begin] = any;
  }
}

// The block's panels hold a non-finite value: rows that no query of this group attends are zeroed, so that they are not
// even multiplied by 0. The caller packs the panels again afterwards.
template <Unit U>
void DropUnattended(const Head& head, const GroupRows& g, std::int64_t block, std::int64_t packed, std::int64_t padded,
                    typename U::Word* panels) {
  bool attended[kKeyBlock];
  const std::int64_t count = std::min(packed, head.s.sk - block);
  AttendedKeys(head, g, block, count, attended);
  for (std::int64_t j = 0; j < count; ++j) {
    if (attended[j]) continue;
    for (std::int64_t i = 0; i < padded; ++i) U::ClearRow(U::PanelWord(panels, packed, i, j), j);
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

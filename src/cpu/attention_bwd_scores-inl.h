// From q, k, v and dO to P and dS, a block of keys at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/attention_bwd_rows-inl.h"
#include "cpu/keys-inl.h"
#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/softmax-inl.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Groups whose P^T and dS^T stand side by side, so that the sums over rows run over 2 * kGroup of them at a time.
constexpr int kSpan = 2;
constexpr std::int64_t kSpanRows = kSpan * kGroup;

template <Unit U>
class BackwardScores {
  using Word = typename U::Word;

 public:
  BackwardScores(const AttentionBackwardProblem& p, Scratch& scratch) : p_(p), w_(p) {
    p_tile_ = scratch.take<float>(kKeyBlock * kSpanRows);
    ds_tile_ = scratch.take<float>(kKeyBlock * kSpanRows);
    if (p.has_planes()) extra_ = scratch.take<float>(kKeyBlock * kGroup);
    if (p.dropout.p > 0) factors_ = scratch.take<float>(kKeyBlock * kGroup);
    if (p.softcap > 0) slope_ = scratch.take<float>(kKeyBlock * kGroup);
  }

  // [key][kSpanRows]: P^T times the dropout factors, and dS^T.
  const float* p() const { return p_tile_; }
  const float* ds() const { return ds_tile_; }

  // One group's rows against its part of the tile packed as k and v, into columns [column, column + kGroup). dS is with
  // respect to scale * q.k if through_softcap, else with respect to the finished logits.
  void compute(const Head& head, const BackwardRows<U>& rows, std::int64_t group, std::int64_t column, const Word* k,
               const Word* v, const TilePart<U>& part, bool through_softcap, Prefetcher& prefetcher) {
    const DF d;
    const std::int64_t first = part.first, last = part.last, begin = part.tile + first;
    const GroupRows& g = rows.group(group);
    const Lanes<Word> q{rows.q(group), kGroup}, d_o{rows.d_o(group), kGroup};
    const std::int64_t depth = Words<U>(w_.dp), depth_v = Words<U>(w_.dvp), count = last - first;
    float* s_tile = p_tile_ + column;
    float* dp_tile = ds_tile_ + column;
    for (std::int64_t j = first; j < last; j += U::kTileM) {
      U::template Product<kTileN, Sum::kStore>(depth, {k + j * depth, depth, 1}, q, s_tile + j * kSpanRows, kSpanRows);
      U::template Product<kTileN, Sum::kStore>(depth_v, {v + j * depth_v, depth_v, 1}, d_o, dp_tile + j * kSpanRows,
                                               kSpanRows);
      prefetcher.some();
    }
    s_tile += first * kSpanRows;
    dp_tile += first * kSpanRows;
    const bool plain = part.unmasked && !has_score_options(p_);
    const bool capped = p_.softcap > 0 && through_softcap;
    if (capped) softcap_slopes(s_tile, count);
    if (!plain) {
      VF unused[kTileN] = {hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      FinishScores(head, g, begin, count, s_tile, kSpanRows, extra_, unused);
    }
    if (p_.dropout.p > 0) DropoutFactors(head, g, begin, count, factors_);
    const VF factor = hn::Set(d, plain ? p_.scale * kLog2e : 1.0f), log2e = hn::Set(d, kLog2e);
    const bool natural = natural_logits(p_);
    for (int n = 0; n < kTileN; ++n) {
      const VF log2_sum = natural ? hn::LoadU(d, rows.log2_sum(group) + n * kLanes) : hn::Zero(d);
      const VF lse = hn::LoadU(d, rows.lse(group) + n * kLanes), delta = hn::LoadU(d, rows.delta(group) + n * kLanes);
      const auto idle = hn::Eq(lse, hn::Set(d, kInfinity));
      for (std::int64_t j = 0; j < count; ++j) {
        float* s = s_tile + j * kSpanRows + n * kLanes;
        float* dp = dp_tile + j * kSpanRows + n * kLanes;
        // Lanes without a probability (lse = +inf) may hold anything.
        const VF x = hn::LoadU(d, s);
        const VF power = natural ? hn::MulSub(hn::Sub(x, lse), log2e, log2_sum) : hn::MulSub(x, factor, lse);
        const VF p = hn::IfThenZeroElse(idle, Exp2(power));
        VF dropped = p, dprob = hn::LoadU(d, dp);
        if (p_.dropout.p > 0) {
          const VF keep = hn::LoadU(d, factors_ + j * kGroup + n * kLanes);
          dropped = hn::Mul(p, keep);
          dprob = hn::Mul(dprob, keep);
        }
        VF ds = hn::Mul(p, hn::Sub(dprob, delta));
        // A pair without probability has no gradient, whatever its value holds.
        ds = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), ds);
        if (capped) ds = hn::Mul(ds, hn::LoadU(d, slope_ + j * kGroup + n * kLanes));
        hn::StoreU(dropped, d, s);
        hn::StoreU(ds, d, dp);
      }
    }
  }

  // One group's rows against its part of the tile: their logits join running maxima and sums [kGroup]. What p() holds
  // is lost.
  void join_statistics(const Head& head, const BackwardRows<U>& rows, std::int64_t group, const Word* k,
                       const TilePart<U>& part, float* max, float* sum) {
    const DF d;
    const std::int64_t first = part.first, last = part.last;
    const std::int64_t depth = Words<U>(w_.dp);
    const Lanes<Word> q{rows.q(group), kGroup};
    for (std::int64_t j = first; j < last; j += U::kTileM) {
      U::template Product<kTileN, Sum::kStore>(depth, {k + j * depth, depth, 1}, q, p_tile_ + (j - first) * kGroup,
                                               kGroup);
    }
    GroupRows g = rows.group(group);
    g.vectors = kTileN;
    const VF none = hn::Set(d, -kInfinity);
    VF top[kTileN] = {none, none, none}, alpha[kTileN];
    FinishScores(head, g, part.tile + first, last - first, p_tile_, kGroup, extra_, top);
    UpdateMax<kTileN>(max, to_log2(p_), top, alpha);
    Exponentiate<kTileN>(p_, false, p_tile_, last - first, top, alpha, sum);
  }

  // Keys [from, to) of a group's columns that hold no probability.
  void clear(std::int64_t from, std::int64_t to, std::int64_t column) {
    for (std::int64_t j = from; j < to; ++j) {
      std::memset(p_tile_ + j * kSpanRows + column, 0, kGroup * 4);
      std::memset(ds_tile_ + j * kSpanRows + column, 0, kGroup * 4);
    }
  }

 private:
  // slope = d softcap(x) / dx = 1 - tanh(x / softcap)^2, from raw products.
  void softcap_slopes(const float* HWY_RESTRICT products, std::int64_t count) {
    const DF d;
    const VF to_tanh = hn::Set(d, p_.scale / p_.softcap);
    for (std::int64_t j = 0; j < count; ++j) {
      for (int n = 0; n < kTileN; ++n) {
        const VF t = Tanh(hn::Mul(hn::LoadU(d, products + j * kSpanRows + n * kLanes), to_tanh));
        hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, slope_ + j * kGroup + n * kLanes);
      }
    }
  }

  const AttentionBackwardProblem& p_;
  const BackwardWidths<U> w_;
  float *p_tile_ = nullptr, *ds_tile_ = nullptr;
  float *extra_ = nullptr, *factors_ = nullptr, *slope_ = nullptr;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

// The query rows of a backward tile: q and dO, each with rows in lanes (for S^T and dP^T) and as they lie (for dK and
// dV), and the statistics from which P and dS follow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "cpu/plan.h"
#include "cpu/rows-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/scratch.h"
#include "cpu/simd-inl.h"
#include "cpu/unit-inl.h"
#include "problem/attention.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// A head size in whole vectors, as dK and dV are summed.
inline std::int64_t GradientWidth(std::int64_t width) { return round_up(width, HWY_MAX(kLanes, 8)); }

// Head sizes, padded: for the unit's products (dp, dvp), and in whole vectors (dl, dvl).
template <Unit U>
struct BackwardWidths {
  explicit BackwardWidths(const AttentionProblem& p)
      : dp(round_up(p.D, U::kPad)), dvp(round_up(p.Dv, U::kPad)), dl(GradientWidth(p.D)), dvl(GradientWidth(p.Dv)) {}
  const std::int64_t dp, dvp, dl, dvl;
};

// Masks of rows that share a block of keys, of each group as GroupRows has them.
struct MaskedRows {
  const std::uint32_t* masks = nullptr;  // null: no row has one
  std::int64_t stride = 0;               // of groups

  const std::uint32_t* of(std::int64_t group) const { return masks == nullptr ? nullptr : masks + group * stride; }
};

template <Unit U>
class BackwardRows {
  using Word = typename U::Word;

 public:
  // limit: most groups loaded at a time.
  BackwardRows(const AttentionBackwardProblem& p, std::int64_t limit, Scratch& scratch) : p_(p), w_(p) {
    const std::int64_t rows = limit * kGroup;
    line_ = scratch.take<float>(4 * std::max({w_.dp, w_.dvp, w_.dl, w_.dvl}));
    rows_ = scratch.take<GroupRows>(limit);
    lse_ = scratch.take<float>(rows);
    if (natural_logits(p)) log2_sum_ = scratch.take<float>(rows);
    delta_ = scratch.take<float>(rows);
    q_ = scratch.take<Word>(rows * Words<U>(w_.dp));
    do_ = scratch.take<Word>(rows * Words<U>(w_.dvp));
    q_rows_ = scratch.take<Word>(rows * Words<U>(w_.dl));
    do_rows_ = scratch.take<Word>(rows * Words<U>(w_.dvl));
  }

  void load(const Head& head, std::int64_t begin, std::int64_t end) {
    groups_ = ceil_div(end - begin, kGroup);
    for (std::int64_t group = 0; group < groups_; ++group) {
      const std::int64_t at = begin + group * kGroup;
      PrepareRows(p_, head.b, head.s, head.kv_head, at, std::min<std::int64_t>(kGroup, end - at), rows_[group]);
      gather(head, group);
    }
  }
  // Rows begin + listed[0], begin + listed[1], ..., of which each meets some of `keys`.
  void load(const Head& head, std::int64_t begin, std::span<const std::int32_t> listed, const MaskedRows& masked,
            KeyRange keys) {
    const auto count = static_cast<std::int64_t>(listed.size());
    groups_ = ceil_div(count, kGroup);
    for (std::int64_t group = 0; group < groups_; ++group) {
      const std::int64_t at = group * kGroup;
      PrepareRows(p_, head.b, head.s, head.kv_head, begin, std::min<std::int64_t>(kGroup, count - at), rows_[group],
                  listed.data() + at, keys, masked.of(group));
      gather(head, group);
    }
  }
  std::int64_t groups() const { return groups_; }
  const GroupRows& group(std::int64_t group) const { return rows_[group]; }
  // What is taken off a kept logit to make its probability's exponent; +inf: the row has none.
  const float* lse(std::int64_t group) const { return lse_ + group * kGroup; }
  // Of natural logits, the binary logarithm of what is left of the denominator besides: 0 but where replace_lse() said
  // so.
  const float* log2_sum(std::int64_t group) const { return log2_sum_ + group * kGroup; }

  // An lse so far from 0 that a float32 there does not tell how many keys share the row: every key of the row has a
  // bias such as the lowest float. Up to here the rounding of lse changes P by at most 2^17 * 2^-24 < 1 %.
  static constexpr float kAbsorbing = 131072.0f;
  bool absorbed(std::int64_t group, std::int64_t lane) const {
    const float lse = std::abs(this->lse(group)[lane]);
    return natural_logits(p_) && !p_.merged && lse >= kAbsorbing && lse < kInfinity;
  }
  bool absorbed(std::int64_t group) const {
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      if (absorbed(group, lane)) return true;
    }
    return false;
  }
  void replace_lse(std::int64_t group, std::int64_t lane, float max, float sum) {
    lse_[group * kGroup + lane] = max;
    log2_sum_[group * kGroup + lane] = std::log2(sum);
  }
  const float* delta(std::int64_t group) const { return delta_ + group * kGroup; }
  // Rows in lanes, [d][kGroup].
  const Word* q(std::int64_t group) const { return q_ + group * Words<U>(w_.dp) * kGroup; }
  const Word* d_o(std::int64_t group) const { return do_ + group * Words<U>(w_.dvp) * kGroup; }
  // Rows as they lie, [row][dl] and [row][dvl].
  const Word* q_rows(std::int64_t group) const { return q_rows_ + Words<U>(group * kGroup * w_.dl); }
  const Word* do_rows(std::int64_t group) const { return do_rows_ + Words<U>(group * kGroup * w_.dvl); }

  // dq [d][kGroup] of the group, to memory.
  void store_dq(const Head& head, std::int64_t group, const float* dq) const {
    ScatterRows(p_, p_.dq, p_.D, w_.dp, head.b, head.s, head.kv_head, rows_[group], dq, kGroup, line_, p_.accumulate);
  }

 private:
  void gather(const Head& head, std::int64_t group) {
    const GroupRows& g = rows_[group];
    const std::int64_t lanes = kGroup;
    load_statistics(head, g, lse_ + group * kGroup, delta_ + group * kGroup);
    if (log2_sum_ != nullptr) std::memset(log2_sum_ + group * kGroup, 0, kGroup * 4);
    GatherRowsTransposed<U>(p_, p_.q, p_.D, w_.dp, head.b, head.s, head.kv_head, g, lanes,
                            q_ + group * Words<U>(w_.dp) * kGroup, kGroup, line_);
    GatherRowsTransposed<U>(p_, p_.d_o, p_.Dv, w_.dvp, head.b, head.s, head.kv_head, g, lanes,
                            do_ + group * Words<U>(w_.dvp) * kGroup, kGroup, line_);
    gather_rows(head, p_.q, p_.D, w_.dl, g, lse(group), q_rows_ + Words<U>(group * kGroup * w_.dl));
    gather_rows(head, p_.d_o, p_.Dv, w_.dvl, g, lse(group), do_rows_ + Words<U>(group * kGroup * w_.dvl));
  }

  // Rows as they lie, [row][d], a word holding neighbouring rows. Rows without a probability may hold anything and
  // become zeros.
  void gather_rows(const Head& head, const Operand& x, std::int64_t width, std::int64_t padded, const GroupRows& g,
                   const float* lse, Word* HWY_RESTRICT out) {
    using Element = typename U::Element;
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      const auto put = [&](Element* to) HWY_ATTR {
        if (!(lse[lane] == kInfinity)) {
          const Row row = row_of(p_, head.kv_head, g, lane);
          U::PackRow(x, x.at(head.b, head.s.q_begin + row.i, row.h), width, padded, to);
        } else {
          std::memset(to, 0, static_cast<std::size_t>(padded) * sizeof(Element));
        }
      };
      U::PackLaneRow(lane, padded, line_, put, out);
    }
  }

  // lse as logits are kept, +inf for lanes without a probability; delta = sum_d dO O - d_lse.
  void load_statistics(const Head& head, const GroupRows& g, float* HWY_RESTRICT lse, float* HWY_RESTRICT delta) {
    const DF d;
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      lse[lane] = kInfinity;
      delta[lane] = 0.0f;
      if (lane >= g.count) continue;
      const Row row = row_of(p_, head.kv_head, g, lane);
      if (row.i >= head.s.sq) continue;
      const std::int64_t at = head.s.q_begin + row.i;
      const float value = p_.lse.as<const float>()[p_.lse.offset(head.b, row.h, at)];
      if (value == -kInfinity) continue;
      lse[lane] = value * to_kept(p_);
      float *o = line_, *d_o = line_ + w_.dvl;
      LoadRow(p_.o.at(head.b, at, row.h), p_.o.dtype, p_.o.stride_d, p_.Dv, w_.dvl, o);
      LoadRow(p_.d_o.at(head.b, at, row.h), p_.d_o.dtype, p_.d_o.stride_d, p_.Dv, w_.dvl, d_o);
      VF sum = hn::Zero(d);
      for (std::int64_t i = 0; i < w_.dvl; i += kLanes)
        sum = hn::MulAdd(hn::LoadU(d, o + i), hn::LoadU(d, d_o + i), sum);
      delta[lane] = hn::GetLane(hn::SumOfLanes(d, sum));
      // o = 0 and all of the denominator from the sink: the row attends no key, and its dO may hold anything.
      if (p_.sink && value == p_.sink.as<const float>()[row.h * p_.sink.stride_h] &&
          std::all_of(o, o + p_.Dv, [](float x) { return x == 0.0f; })) {
        lse[lane] = kInfinity;
        delta[lane] = 0.0f;
        continue;
      }
      if (p_.d_lse) delta[lane] -= p_.d_lse.as<const float>()[p_.d_lse.offset(head.b, row.h, at)];
    }
  }

  const AttentionBackwardProblem& p_;
  const BackwardWidths<U> w_;
  std::int64_t groups_ = 0;
  GroupRows* rows_ = nullptr;
  float *line_ = nullptr, *lse_ = nullptr, *log2_sum_ = nullptr, *delta_ = nullptr;
  Word *q_ = nullptr, *do_ = nullptr, *q_rows_ = nullptr, *do_rows_ = nullptr;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

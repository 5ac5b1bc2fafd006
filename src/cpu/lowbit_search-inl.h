// Rows of weights as quantisation reads them, and the search among a group's scales.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/lowbit_elements-inl.h"
#include "cpu/lowbit_kernels.h"
#include "cpu/simd-inl.h"
#include "lowbit/scale_rules.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// A row of weights, widened a chunk at a time.
class LowbitRow {
 public:
  LowbitRow(const lowbit::Weights& weights, std::int64_t row, std::int64_t columns)
      : weights_(weights), row_(row), columns_(columns) {}

  // Weights from k to the end of k's chunk, followed by zeros up to whole vectors.
  const float* from(std::int64_t k) {
    const std::int64_t begin = k / kLowbitChunk * kLowbitChunk;
    if (begin != begin_) {
      const std::int64_t count = std::min(columns_ - begin, kLowbitChunk);
      LoadRow(weights_.at(row_, begin), weights_.dtype, weights_.stride_k, count,
              (count + kLanes - 1) / kLanes * kLanes, buffer_);
      begin_ = begin;
    }
    return buffer_ + (k - begin);
  }

 private:
  const lowbit::Weights& weights_;
  std::int64_t row_, columns_, begin_ = -1;
  alignas(64) float buffer_[kLowbitChunk];
};

// Columns of [k, end) that are in k's chunk.
HWY_INLINE std::int64_t Piece(std::int64_t k, std::int64_t end) {
  return std::min(end, (k / kLowbitChunk + 1) * kLowbitChunk) - k;
}

inline std::uint32_t LargestWeight(const lowbit::Weights& weights, std::int64_t row, std::int64_t columns) {
  const DF d;
  const DI di;
  LowbitRow values(weights, row, columns);
  VI most = hn::Zero(di);
  for (std::int64_t k = 0; k < columns; k += kLowbitChunk) {
    const float* w = values.from(k);
    const std::int64_t count = Piece(k, columns);
    for (std::int64_t j = 0; j < count; j += kLanes) {
      most = hn::Max(most, hn::BitCast(di, hn::Abs(hn::LoadU(d, w + j))));
    }
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, most)));
}

HWY_INLINE lowbit::Range RangeOf(LowbitRow& row, std::int64_t begin, std::int64_t end, bool zero_points) {
  const DF d;
  VF low = hn::Zero(d), high = hn::Zero(d);
  for (std::int64_t k = begin; k < end; k += Piece(k, end)) {
    const float* w = row.from(k);
    const std::int64_t count = Piece(k, end);
    for (std::int64_t j = 0; j < count; j += kLanes) {
      const VF v = hn::LoadU(d, w + j);
      if (zero_points) low = hn::Min(low, v);
      high = hn::Max(high, zero_points ? v : hn::Abs(v));
    }
  }
  return {zero_points ? hn::GetLane(hn::MinOfLanes(d, low)) : 0.0f, hn::GetLane(hn::MaxOfLanes(d, high))};
}

using DHalf = hn::Half<DF>;
using DWide = hn::Rebind<double, DHalf>;
using VWide = hn::Vec<DWide>;

HWY_INLINE VWide LowerWide(VF v) { return hn::PromoteTo(DWide(), hn::LowerHalf(DHalf(), v)); }
HWY_INLINE VWide UpperWide(VF v) { return hn::PromoteTo(DWide(), hn::UpperHalf(DHalf(), v)); }

// w - value * scale, rounded once.
HWY_INLINE VF Difference(VF w, VF value, VF scale) {
#if HWY_NATIVE_FMA
  return hn::NegMulAdd(value, scale, w);
#else
  const DHalf half;
  const VWide lower = hn::Sub(LowerWide(w), hn::Mul(LowerWide(value), LowerWide(scale)));
  const VWide upper = hn::Sub(UpperWide(w), hn::Mul(UpperWide(value), UpperWide(scale)));
  return hn::Combine(DF(), hn::DemoteTo(half, upper), hn::DemoteTo(half, lower));
#endif
}

// Scales of 0 stand for groups that are all zero: dividing by infinity makes them so.
HWY_INLINE VF Divisor(VF scale) {
  const DF d;
  return hn::IfThenElse(hn::Gt(scale, hn::Zero(d)), scale, hn::Set(d, kInfinity));
}

// Candidates lie in lanes, so that each one's errors are summed in the order of the columns.
template <class Lanes, bool kWeighed>
HWY_INLINE int Best(LowbitRow& row, std::int64_t begin, std::int64_t end, const float* importance,
                    lowbit::Candidates& c) {
  const DF d;
  const DWide dw;
  constexpr int kHalf = kLanes / 2;
  alignas(64) double errors[lowbit::kMaxCandidates] = {};
  for (int i = c.count; i % kLanes != 0; ++i) {
    c.scale[i] = c.scale[0];
    c.zero[i] = c.zero[0];
  }
  for (std::int64_t k = begin; k < end; k += Piece(k, end)) {
    const float* w = row.from(k);
    const std::int64_t count = Piece(k, end);
    for (int first = 0; first < c.count; first += kLanes) {
      const VF scale = hn::LoadU(d, &c.scale[first]), divisor = Divisor(scale);
      const Lanes lanes(hn::LoadU(d, &c.zero[first]));
      VWide lower = hn::Load(dw, errors + first), upper = hn::Load(dw, errors + first + kHalf);
      for (std::int64_t j = 0; j < count; ++j) {
        const VF weight = hn::Set(d, w[j]);
        const VF difference = Difference(weight, lanes.Value(hn::Div(weight, divisor)), scale);
        VF weighed = difference;
        if constexpr (kWeighed) weighed = hn::Mul(hn::Set(d, importance[k + j]), difference);
        lower = hn::MulAdd(LowerWide(weighed), LowerWide(difference), lower);
        upper = hn::MulAdd(UpperWide(weighed), UpperWide(difference), upper);
      }
      hn::Store(lower, dw, errors + first);
      hn::Store(upper, dw, errors + first + kHalf);
    }
  }
  int best = 0;
  for (int i = 1; i < c.count; ++i) {
    if (errors[i] < errors[best]) best = i;
  }
  return best;
}

// Groups that a search takes together, so that few candidates fill the lanes too: `per` lanes for each. Gathers of 8
// lanes and fewer cost what the fuller lanes gain.
struct Batch {
  int groups, per;
};
HWY_INLINE Batch BatchOf(const lowbit::Format& format, lowbit::ScaleRule rule) {
  int per = kLanes;
  if (kLanes == 16 && rule == lowbit::ScaleRule::four_six) per = 2;
  if (kLanes == 16 && format.scale == lowbit::ScaleType::e8m0 && rule == lowbit::ScaleRule::mse) per = 4;
  return {kLanes / per, per};
}

// As Best, for `count` neighbouring groups of one chunk, whose candidates are at most batch.per.
template <class Lanes, bool kWeighed>
HWY_INLINE void BestTogether(const float* w, std::int64_t group, int count, const float* importance, Batch batch,
                             const lowbit::Candidates* candidates, int* best) {
  const DF d;
  const DI di;
  const DWide dw;
  constexpr int kHalf = kLanes / 2;
  alignas(64) float scales[kLanes];
  alignas(64) std::int32_t offsets[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int i = std::min(lane / batch.per, count - 1);
    scales[lane] = candidates[i].scale[std::min(lane % batch.per, candidates[i].count - 1)];
    offsets[lane] = static_cast<std::int32_t>(i * group);
  }
  const VF scale = hn::Load(d, scales), divisor = Divisor(scale);
  const VI index = hn::Load(di, offsets);
  const Lanes lanes(hn::Set(d, lowbit::kInt4Zero));
  VWide lower = hn::Zero(dw), upper = hn::Zero(dw);
  for (std::int64_t j = 0; j < group; ++j) {
    const VF weight = hn::GatherIndex(d, w + j, index);
    const VF difference = Difference(weight, lanes.Value(hn::Div(weight, divisor)), scale);
    VF weighed = difference;
    if constexpr (kWeighed) weighed = hn::Mul(hn::GatherIndex(d, importance + j, index), difference);
    lower = hn::MulAdd(LowerWide(weighed), LowerWide(difference), lower);
    upper = hn::MulAdd(UpperWide(weighed), UpperWide(difference), upper);
  }
  alignas(64) double errors[kLanes];
  hn::Store(lower, dw, errors);
  hn::Store(upper, dw, errors + kHalf);
  for (int i = 0; i < count; ++i) {
    const double* mine = errors + i * batch.per;
    best[i] = 0;
    for (int c = 1; c < candidates[i].count; ++c) {
      if (mine[c] < mine[best[i]]) best[i] = c;
    }
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

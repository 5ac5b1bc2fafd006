// Quantisation of one row: the range of a group, the best of the scales that the rule considers, the codes. Included
// once for each target. Gives the bits of reference/lowbit.cc.

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

// Codes of `count` weights, a byte each; whole vectors are read and written.
template <class Lanes>
HWY_INLINE void Encode(const float* w, std::int64_t count, float scale, float zero, std::uint8_t* codes) {
  const DF d;
  const hn::Rebind<std::uint8_t, DI> bytes;
  const VF divisor = Divisor(hn::Set(d, scale));
  const Lanes lanes(hn::Set(d, zero));
  for (std::int64_t j = 0; j < count; j += kLanes) {
    hn::StoreU(hn::DemoteTo(bytes, lanes.Code(hn::Div(hn::LoadU(d, w + j), divisor))), bytes, codes + j);
  }
}

// Two codes to a byte; an odd last one has code 0 beside it.
inline void PackNibbles(const std::uint8_t* codes, std::int64_t count, bool high_first, std::uint8_t* to) {
  const hn::ScalableTag<std::uint16_t> d16;
  const hn::Rebind<std::uint8_t, decltype(d16)> d8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d16));
  const auto low_byte = hn::Set(d16, std::uint16_t{255});
  std::int64_t j = 0;
  for (; j + 2 * lanes <= count; j += 2 * lanes) {
    const auto pairs = hn::BitCast(d16, hn::LoadU(hn::ScalableTag<std::uint8_t>(), codes + j));
    const auto mixed = high_first ? hn::Or(hn::ShiftLeft<4>(pairs), hn::ShiftRight<8>(pairs))
                                  : hn::Or(pairs, hn::ShiftRight<4>(pairs));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(hn::RebindToSigned<decltype(d16)>(), hn::And(mixed, low_byte))), d8,
               to + j / 2);
  }
  for (; j < count; j += 2) {
    const unsigned even = codes[j], odd = j + 1 < count ? codes[j + 1] : 0u;
    to[j / 2] = (high_first ? lowbit::NibblePair::of(odd, even) : lowbit::NibblePair::of(even, odd)).byte;
  }
}

HWY_INLINE void StoreScale(const lowbit::Matrix& out, std::int64_t index, std::uint32_t stored) {
  if (out.format.scale == lowbit::ScaleType::f32) {
    std::memcpy(static_cast<float*>(out.scales) + index, &stored, 4);
  } else if (out.format.scale == lowbit::ScaleType::f16) {
    static_cast<std::uint16_t*>(out.scales)[index] = static_cast<std::uint16_t>(stored);
  } else {
    static_cast<std::uint8_t*>(out.scales)[index] = static_cast<std::uint8_t>(stored);
  }
}

template <class Lanes>
void EncodeRowAs(const lowbit::QuantizeProblem& p, std::int64_t n) {
  const lowbit::Matrix& out = p.out;
  LowbitRow row(p.weights, n, out.K);
  alignas(64) std::uint8_t codes[kLowbitChunk];
  lowbit::Candidates candidates;
  for (std::int64_t g = 0; g < out.groups; ++g) {
    const std::int64_t begin = g * out.group, end = std::min(begin + out.group, out.K);
    const lowbit::Range range = RangeOf(row, begin, end, out.format.zero_points);
    lowbit::find_candidates(out.format, p.rule, range, p.global_scale, candidates);
    int c = 0;
    if (candidates.count > 1) {
      c = p.importance != nullptr ? Best<Lanes, true>(row, begin, end, p.importance, candidates)
                                  : Best<Lanes, false>(row, begin, end, nullptr, candidates);
    }
    StoreScale(out, n * out.groups + g, candidates.stored[c]);
    if (out.format.zero_points) out.zeros[n * out.groups + g] = static_cast<std::uint8_t>(candidates.zero[c]);
    for (std::int64_t k = begin; k < end; k += Piece(k, end)) {
      const std::int64_t count = Piece(k, end), in_chunk = k % kLowbitChunk;
      Encode<Lanes>(row.from(k), count, candidates.scale[c], candidates.zero[c], codes + in_chunk);
      if (k + count < out.K && in_chunk + count < kLowbitChunk) continue;
      std::uint8_t* to = out.codes + n * out.row_bytes;
      const std::int64_t filled = in_chunk + count, first = k + count - filled;
      if (lowbit::bits_of(out.format.element) == 8) {
        std::memcpy(to + first, codes, static_cast<std::size_t>(filled));
      } else {
        PackNibbles(codes, filled, out.format.high_nibble_first, to + first / 2);
      }
    }
  }
}

inline void EncodeRow(const lowbit::QuantizeProblem& p, std::int64_t n) {
  WithElement(p.out.format.element, [&]<class Lanes>() HWY_ATTR { EncodeRowAs<Lanes>(p, n); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

// Quantisation of one row: the range of a group, the best of the scales that the rule considers, the codes. Gives the
// bits of reference/lowbit.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/lowbit_elements-inl.h"
#include "cpu/lowbit_kernels.h"
#include "cpu/lowbit_search-inl.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

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

// One row on its way into storage.
template <class Lanes>
class RowEncoder {
 public:
  RowEncoder(const lowbit::QuantizeProblem& p, std::int64_t n)
      : p_(p), out_(p.out), n_(n), row_(p.weights, n, p.out.K), batch_(BatchOf(p.out.format, p.rule)) {}

  void run() {
    lowbit::Candidates candidates[kLanes / 2];
    int best[kLanes / 2] = {};
    for (std::int64_t g = 0; g < out_.groups; g += batch_.groups) {
      const int count = static_cast<int>(std::min<std::int64_t>(batch_.groups, out_.groups - g));
      for (int i = 0; i < count; ++i) {
        const lowbit::Range range = RangeOf(row_, begin(g + i), end(g + i), out_.format.zero_points);
        lowbit::find_candidates(out_.format, p_.rule, range, p_.global_scale, candidates[i]);
      }
      if (lowbit::searches(p_.rule)) choose(g, count, candidates, best);
      for (int i = 0; i < count; ++i) write(g + i, candidates[i], best[i]);
    }
  }

 private:
  std::int64_t begin(std::int64_t g) const { return g * out_.group; }
  std::int64_t end(std::int64_t g) const { return std::min(begin(g) + out_.group, out_.K); }

  HWY_INLINE void choose(std::int64_t g, int count, lowbit::Candidates* candidates, int* best) {
    if constexpr (std::is_same_v<Lanes, E2m1Even>) {
      if (batch_.groups > 1) {
        const float* w = row_.from(begin(g));
        return p_.importance != nullptr
                   ? BestTogether<Lanes, true>(w, out_.group, count, p_.importance + begin(g), batch_, candidates, best)
                   : BestTogether<Lanes, false>(w, out_.group, count, nullptr, batch_, candidates, best);
      }
    }
    best[0] = p_.importance != nullptr ? Best<Lanes, true>(row_, begin(g), end(g), p_.importance, candidates[0])
                                       : Best<Lanes, false>(row_, begin(g), end(g), nullptr, candidates[0]);
  }

  // Scale, zero point and codes of a group; packed codes when a chunk of them is there.
  void write(std::int64_t g, const lowbit::Candidates& candidates, int c) {
    const std::int64_t index = n_ * out_.groups + g;
    StoreScale(out_, index, candidates.stored[c]);
    if (out_.format.zero_points) out_.zeros[index] = static_cast<std::uint8_t>(candidates.zero[c]);
    for (std::int64_t k = begin(g); k < end(g); k += Piece(k, end(g))) {
      const std::int64_t count = Piece(k, end(g)), in_chunk = k % kLowbitChunk, filled = in_chunk + count;
      Encode<Lanes>(row_.from(k), count, candidates.scale[c], candidates.zero[c], codes_ + in_chunk);
      if (k + count == out_.K || filled == kLowbitChunk) pack(k - in_chunk, filled);
    }
  }

  void pack(std::int64_t first, std::int64_t count) {
    std::uint8_t* to = out_.codes + n_ * out_.row_bytes;
    if (lowbit::bits_of(out_.format.element) == 8) {
      std::memcpy(to + first, codes_, static_cast<std::size_t>(count));
    } else {
      PackNibbles(codes_, count, out_.format.high_nibble_first, to + first / 2);
    }
  }

  const lowbit::QuantizeProblem& p_;
  const lowbit::Matrix& out_;
  std::int64_t n_;
  LowbitRow row_;
  Batch batch_;
  alignas(64) std::uint8_t codes_[kLowbitChunk];  // a byte each
};

inline void EncodeRow(const lowbit::QuantizeProblem& p, std::int64_t n) {
  WithElement(p.out.format.element, [&]<class Lanes>() HWY_ATTR { RowEncoder<Lanes>(p, n).run(); });
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

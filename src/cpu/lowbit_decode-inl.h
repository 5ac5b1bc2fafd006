// Dequantisation of a piece of one row. Gives the bits of reference/lowbit.cc.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/lowbit_elements-inl.h"
#include "cpu/lowbit_kernels.h"
#include "cpu/simd-inl.h"
#include "lowbit/formats.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// values[code] for codes 0 to 15.
class Table16 {
 public:
  explicit Table16(const float* values)
      : values_(values), low_(hn::LoadU(DF(), values)), high_(hn::LoadU(DF(), values + 16 - kLanes)) {}

  HWY_INLINE VF operator()(VI code) const {
    const DF d;
    const DI di;
    if constexpr (kLanes == 16) {
      return hn::TableLookupLanes(low_, hn::IndicesFromVec(d, code));
    } else if constexpr (kLanes == 8) {
      const auto index = hn::IndicesFromVec(d, hn::And(code, hn::Set(di, 7)));
      const auto upper = hn::RebindMask(d, hn::Gt(code, hn::Set(di, 7)));
      return hn::IfThenElse(upper, hn::TableLookupLanes(high_, index), hn::TableLookupLanes(low_, index));
    } else {
      return hn::GatherIndex(d, values_, code);
    }
  }

 private:
  const float* values_;
  VF low_, high_;
};

inline constexpr std::array<float, 16> kE2m1Values = [] {
  std::array<float, 16> values{};
  for (unsigned code = 0; code < 16; ++code) values[code] = lowbit::E2M1{static_cast<std::uint8_t>(code)}.value();
  return values;
}();
inline constexpr std::array<float, 16> kFp4BnbValues = [] {
  std::array<float, 16> values{};
  for (unsigned code = 0; code < 16; ++code) values[code] = lowbit::FP4Bnb{static_cast<std::uint8_t>(code)}.value();
  return values;
}();

// The codes of kLanes columns in kLanes / 2 bytes, one to a lane: every lane gets its 32 bits and shifts its own down.
template <bool kHighFirst>
HWY_INLINE VI LoadNibbles(const std::uint8_t* codes) {
  const DU du;
  alignas(64) static constexpr std::uint32_t kLowFirst[16] = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  alignas(64) static constexpr std::uint32_t kSwapped[16] = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24};
  std::uint32_t first = 0;
  std::memcpy(&first, codes, kLanes == 4 ? 2 : 4);
  VU words = hn::Set(du, first);
  if constexpr (kLanes == 16) {
    const hn::Half<DU> half;
    std::uint32_t second = 0;
    std::memcpy(&second, codes + 4, 4);
    words = hn::Combine(du, hn::Set(half, second), hn::LowerHalf(half, words));
  }
  const VU shifts = hn::Load(du, kHighFirst ? kSwapped : kLowFirst);
  return hn::BitCast(DI(), hn::And(hn::Shr(words, shifts), hn::Set(du, 15u)));
}

template <bool kHighFirst>
HWY_INLINE int NibbleAt(const std::uint8_t* codes, std::int64_t k) {
  const lowbit::NibblePair pair{codes[k / 2]};
  return (k % 2 == 1) != kHighFirst ? pair.high() : pair.low();
}

// Codes to values, `count` of them times `scale`. `codes` is where column 0 of the span lies; spans begin at even
// columns. Without kTail `count` is a multiple of the vectors.
template <bool kHighFirst>
struct TableDecoder {
  explicit TableDecoder(const float* table) : values(table), lookup(table) {}
  template <bool kTail>
  HWY_INLINE void Span(const std::uint8_t* codes, std::int64_t count, float scale, float, float* to) const {
    const DF d;
    const VF factor = hn::Set(d, scale);
    std::int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      hn::StoreU(hn::Mul(lookup(LoadNibbles<kHighFirst>(codes + k / 2)), factor), d, to + k);
    }
    for (; kTail && k < count; ++k) to[k] = values[NibbleAt<kHighFirst>(codes, k)] * scale;
  }
  const float* values;
  Table16 lookup;
};

struct Int4Decoder {
  template <bool kTail>
  HWY_INLINE void Span(const std::uint8_t* codes, std::int64_t count, float scale, float zero, float* to) const {
    const DF d;
    const VF factor = hn::Set(d, scale), offset = hn::Set(d, zero);
    std::int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      const VF code = hn::ConvertTo(d, LoadNibbles<false>(codes + k / 2));
      hn::StoreU(hn::Mul(hn::Sub(code, offset), factor), d, to + k);
    }
    for (; kTail && k < count; ++k) to[k] = (static_cast<float>(NibbleAt<false>(codes, k)) - zero) * scale;
  }
};

struct Int8Decoder {
  template <bool kTail>
  HWY_INLINE void Span(const std::uint8_t* codes, std::int64_t count, float scale, float, float* to) const {
    const DF d;
    const DI di;
    const hn::Rebind<std::int8_t, DI> d8;
    const auto* from = reinterpret_cast<const std::int8_t*>(codes);
    const VF factor = hn::Set(d, scale);
    std::int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      const VF value = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, from + k)));
      hn::StoreU(hn::Mul(value, factor), d, to + k);
    }
    for (; kTail && k < count; ++k) to[k] = static_cast<float>(from[k]) * scale;
  }
};

// E4M3 bits, one to a lane.
HWY_INLINE VF E4m3Value(VI bits) {
  const DF d;
  const DI di;
  const VI magnitude = hn::And(bits, hn::Set(di, 127));
  const VI sign = hn::ShiftLeft<24>(hn::AndNot(hn::Set(di, 127), bits));
  const VF normal = hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 0x3c000000)));
  const VF small = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-9f));
  VF value = hn::IfThenElse(hn::RebindMask(d, hn::Lt(magnitude, hn::Set(di, 8))), small, normal);
  const auto nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(di, 127)));
  value = hn::IfThenElse(nan, hn::BitCast(d, hn::Set(di, 0x7fc00000)), value);
  return hn::Or(value, hn::BitCast(d, sign));
}

struct E4m3Decoder {
  template <bool kTail>
  HWY_INLINE void Span(const std::uint8_t* codes, std::int64_t count, float scale, float, float* to) const {
    const DF d;
    const DI di;
    const hn::Rebind<std::uint8_t, DI> d8;
    const VF factor = hn::Set(d, scale);
    std::int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      const VF value = E4m3Value(hn::PromoteTo(di, hn::LoadU(d8, codes + k)));
      hn::StoreU(hn::Mul(value, factor), d, to + k);
    }
    for (; kTail && k < count; ++k) to[k] = f8e4m3_to_f32(codes[k]) * scale;
  }
};

// kGroup: m.group where it is so small that its loop should be unrolled, else 0.
template <int kGroup, class Decoder>
void DecodeGroups(const Decoder& decode, const lowbit::Matrix& m, std::int64_t n, std::int64_t begin,
                  std::int64_t count, float* to) {
  // Scales first, in a loop of their own: of 16 weights each, they would take half of the time between the vectors.
  float scales[kLowbitChunk / 16];
  const std::int64_t group = kGroup != 0 ? kGroup : std::min(m.group, count), groups = (count + group - 1) / group;
  const std::int64_t first = n * m.groups + begin / m.group;
  const float global = m.format.global_scale ? *m.global_scale : 1.0f;
  for (std::int64_t g = 0; g < groups; ++g)
    scales[g] = lowbit::load_scale(m.scales, m.format.scale, first + g) * global;
  const bool nibbles = lowbit::bits_of(m.format.element) == 4;
  const std::uint8_t* codes = m.codes + n * m.row_bytes + (nibbles ? begin / 2 : begin);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t k = g * group;
    const float zero = m.format.zero_points ? static_cast<float>(m.zeros[first + g]) : lowbit::kInt4Zero;
    decode.template Span<kGroup == 0>(codes + (nibbles ? k / 2 : k), kGroup != 0 ? kGroup : std::min(group, count - k),
                                      scales[g], zero, to + k);
  }
}

template <class Decoder>
void DecodeRowBy(const Decoder& decode, const lowbit::Matrix& m, std::int64_t n, std::int64_t begin, std::int64_t count,
                 float* to) {
  if (m.group == 16) return DecodeGroups<16>(decode, m, n, begin, count, to);
  if (m.group == 32) return DecodeGroups<32>(decode, m, n, begin, count, to);
  DecodeGroups<0>(decode, m, n, begin, count, to);
}

inline void DecodeRow(const lowbit::Matrix& m, std::int64_t n, std::int64_t begin, std::int64_t count, float* to) {
  const auto table = [&](const float* values) HWY_ATTR {
    if (m.format.high_nibble_first) {
      DecodeRowBy(TableDecoder<true>(values), m, n, begin, count, to);
    } else {
      DecodeRowBy(TableDecoder<false>(values), m, n, begin, count, to);
    }
  };
  switch (m.format.element) {
    case lowbit::Element::e2m1:
    case lowbit::Element::e2m1_row:
      return table(kE2m1Values.data());
    case lowbit::Element::nf4:
      return table(lowbit::NF4::kValues.data());
    case lowbit::Element::fp4_bnb:
      return table(kFp4BnbValues.data());
    case lowbit::Element::int4:
      return DecodeRowBy(Int4Decoder(), m, n, begin, count, to);
    case lowbit::Element::int8:
      return DecodeRowBy(Int8Decoder(), m, n, begin, count, to);
    case lowbit::Element::e4m3:
      return DecodeRowBy(E4m3Decoder(), m, n, begin, count, to);
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

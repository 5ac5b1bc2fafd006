// Packed weights, one column of kLanes rows at a time. A panel of 16 rows is kSlices vectors; value * scale has the
// bits of lowbit::packed_value().
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "cpu/lowbit_decode-inl.h"
#include "cpu/lowbit_elements-inl.h"
#include "cpu/simd-inl.h"
#include "lowbit/packed.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

constexpr int kSlices = static_cast<int>(lowbit::kPanelRows) / kLanes;

// Whether the last 16 bits of all values are zeros.
constexpr bool AreShort(const std::array<float, 16>& values) {
  for (const float value : values) {
    if ((std::bit_cast<std::uint32_t>(value) & 0xffffu) != 0) return false;
  }
  return true;
}

// values[code] for the code in the low four bits of each lane, whatever is above them. kShort: AreShort(values).
template <bool kShort>
class NibbleTable {
 public:
#if HWY_TARGET == HWY_AVX3  // the permutation looks at four bits of an index itself
  explicit NibbleTable(const float* values) : values_(hn::LoadU(DF(), values)) {}
  HWY_INLINE VF operator()(VU word) const { return VF{_mm512_permutexvar_ps(word.raw, values_.raw)}; }

 private:
  VF values_;
#elif HWY_TARGET == HWY_AVX2  // at three of them, and the blend at the sign
  explicit NibbleTable(const float* values) : low_(hn::LoadU(DF(), values)), high_(hn::LoadU(DF(), values + kLanes)) {}
  HWY_INLINE VF operator()(VU word) const {
    const __m256 low = _mm256_permutevar8x32_ps(low_.raw, word.raw);
    const __m256 high = _mm256_permutevar8x32_ps(high_.raw, word.raw);
    return VF{_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(word.raw, 28)))};
  }

 private:
  VF low_, high_;
#else  // Sixteen bytes at a time: the code to all bytes of its lane, and for each byte of a float a table of its own.
  explicit NibbleTable(const float* values) {
    for (int byte = 0; byte < 4; ++byte) {
      alignas(16) std::uint8_t plane[16];
      for (int code = 0; code < 16; ++code) {
        plane[code] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(values[code]) >> 8 * byte);
      }
      planes_[byte] = hn::Load(D8(), plane);
    }
  }
  HWY_INLINE VF operator()(VU word) const {
    alignas(16) static constexpr std::uint8_t kFirstOfLane[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const DU du;
    const auto code = hn::BitCast(D8(), hn::And(word, hn::Set(du, 15u)));
    const auto index = hn::TableLookupBytes(code, hn::Load(D8(), kFirstOfLane));
    const auto byte = [&](int n) HWY_ATTR {
      return hn::And(hn::BitCast(du, hn::TableLookupBytes(planes_[n], index)), hn::Set(du, 0xffu << 8 * n));
    };
    VU bits = hn::Or(byte(2), byte(3));
    if constexpr (!kShort) bits = hn::Or(bits, hn::Or(byte(0), byte(1)));
    return hn::BitCast(DF(), bits);
  }

 private:
  V8 planes_[4];
#endif
};

// Codes of eight columns: Load() of what lies there, then Value() of one column after the other.
template <bool kShort>
struct NibbleCodes {
  using Word = VU;
  static constexpr bool kZeros = false;
  explicit NibbleCodes(const float* values) : table(values) {}
  HWY_INLINE Word Load(const std::uint8_t* step, int slice) const {
    return hn::LoadU(DU(), reinterpret_cast<const std::uint32_t*>(step) + slice * kLanes);
  }
  HWY_INLINE VF Value(Word& word, VF) const {
    const VF value = table(word);
    word = hn::ShiftRight<4>(word);
    return value;
  }
  NibbleTable<kShort> table;
};

// Less a zero point, exactly: a sum of codes alone would cancel against it.
struct ZeroPointCodes : NibbleCodes<true> {
  using NibbleCodes::NibbleCodes;
  static constexpr bool kZeros = true;
  HWY_INLINE VF Value(Word& word, VF zero) const { return hn::Sub(NibbleCodes::Value(word, zero), zero); }
};

// Bytes [column][16 rows].
struct ByteCodes {
  using Word = const std::uint8_t*;
  static constexpr bool kZeros = false;
  HWY_INLINE Word Load(const std::uint8_t* step, int slice) const { return step + slice * kLanes; }
};
struct Int8Codes : ByteCodes {
  HWY_INLINE VF Value(Word& at, VF) const {
    const hn::Rebind<std::int8_t, DI> d8;
    const VI code = hn::PromoteTo(DI(), hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(at)));
    at += lowbit::kPanelRows;
    return hn::ConvertTo(DF(), code);
  }
};
// None of them NaN. With four bits of exponent moved to the place of five, an f16 is the value times 2^-8.
struct E4m3Codes : ByteCodes {
  HWY_INLINE VF Value(Word& at, VF) const {
    const DF d;
    const std::uint8_t* from = at;
    at += lowbit::kPanelRows;
    if constexpr (kVectorF16) {
      const hn::Rebind<std::uint8_t, DF> d8;
      const hn::Rebind<std::int16_t, DF> d16;
      const hn::Rebind<hwy::float16_t, DF> half;
      const auto top =
          hn::ShiftLeft<8>(hn::BitCast(d16, hn::PromoteTo(hn::RebindToUnsigned<decltype(d16)>(), hn::LoadU(d8, from))));
      const auto bits = hn::And(hn::ShiftRight<1>(top), hn::Set(d16, static_cast<std::int16_t>(0xbfff)));
      return hn::Mul(hn::PromoteTo(d, hn::BitCast(half, bits)), hn::Set(d, 256.0f));
    } else {
      return E4m3Value(hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<std::uint8_t, DI>(), from)));
    }
  }
};

// Scales of kLanes rows; `index` counts them within a panel.
struct F32Scales {
  static constexpr bool kExact = false;
  HWY_INLINE VF Load(const std::uint8_t* scales, std::int64_t index) const {
    return hn::LoadU(DF(), reinterpret_cast<const float*>(scales) + index);
  }
};
struct F16Scales {
  static constexpr bool kExact = false;
  HWY_INLINE VF Load(const std::uint8_t* scales, std::int64_t index) const {
    if constexpr (kVectorF16) {
      const hn::Rebind<hwy::float16_t, DF> d16;
      return hn::PromoteTo(DF(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(scales) + index));
    } else {
      alignas(64) float wide[kLanes];
      for (int i = 0; i < kLanes; ++i) wide[i] = load_element(scales, DType::f16, index + i);
      return hn::Load(DF(), wide);
    }
  }
};
// kExact: an E2M1 value times such a scale has at most eight significant bits, a bfloat16.
struct E8m0Scales {
  static constexpr bool kExact = true;
  HWY_INLINE VF Load(const std::uint8_t* scales, std::int64_t index) const {
    const DI di;
    const VI bits = hn::PromoteTo(di, hn::LoadU(hn::Rebind<std::uint8_t, DI>(), scales + index));
    const VI least = hn::Set(di, 0x00400000);  // 2^-127, subnormal
    const auto zero = hn::Eq(bits, hn::Zero(di));
    return hn::BitCast(DF(), hn::IfThenElse(zero, least, hn::ShiftLeft<23>(bits)));
  }
};
struct E4m3Scales {
  static constexpr bool kExact = true;  // with a global scale of 1
  explicit E4m3Scales(float factor) : global(hn::Set(DF(), factor)) {}
  HWY_INLINE VF Load(const std::uint8_t* scales, std::int64_t index) const {
    const VI bits = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<std::uint8_t, DI>(), scales + index));
    return hn::Mul(E4m3Value(bits), global);
  }
  VF global;
};

inline constexpr std::array<float, 16> kInt4Values = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) values[code] = static_cast<float>(code) - lowbit::kInt4Zero;
  return values;
}();
inline constexpr std::array<float, 16> kUint4Values = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) values[code] = static_cast<float>(code);
  return values;
}();

static_assert(AreShort(kE2m1Values) && AreShort(kInt4Values) && AreShort(kUint4Values));

// Calls run(codes, scales) with the types of the format. global: what its global scale is taken to be.
template <class Run>
HWY_INLINE void WithFormat(const lowbit::Panels& w, float global, const Run& run) {
  using lowbit::Element;
  switch (w.format.element) {
    case Element::e2m1:
      if (w.format.scale == lowbit::ScaleType::e4m3)
        return run(NibbleCodes<true>(kE2m1Values.data()), E4m3Scales(global));
      return run(NibbleCodes<true>(kE2m1Values.data()), E8m0Scales());
    case Element::e2m1_row:
      return run(NibbleCodes<true>(kE2m1Values.data()), F32Scales());
    case Element::nf4:
      return run(NibbleCodes<false>(lowbit::NF4::kValues.data()), F32Scales());
    case Element::fp4_bnb:
      return run(NibbleCodes<false>(kFp4BnbValues.data()), F32Scales());
    case Element::int4:
      if (w.format.zero_points) return run(ZeroPointCodes(kUint4Values.data()), F16Scales());
      return run(NibbleCodes<true>(kInt4Values.data()), F16Scales());
    case Element::int8:
      return run(Int8Codes(), F32Scales());
    case Element::e4m3:
      return run(E4m3Codes(), F32Scales());
  }
}

// Where kLanes rows of a panel lie.
struct SlicePlace {
  const std::uint8_t* panel;
  int slice;

  // `vector` counts slices from panel `first` on.
  SlicePlace(const lowbit::Panels& w, std::int64_t first, int vector)
      : panel(w.panel(first + vector / kSlices)), slice(vector % kSlices) {}
  std::int64_t scale_index(std::int64_t group) const { return group * lowbit::kPanelRows + slice * kLanes; }
  template <class Codes>
  HWY_INLINE VF Zero(const lowbit::PanelLayout& l, std::int64_t group) const {
    if constexpr (!Codes::kZeros) return hn::Zero(DF());
    const hn::Rebind<std::uint8_t, DI> d8;
    return hn::ConvertTo(DF(), hn::PromoteTo(DI(), hn::LoadU(d8, panel + l.zeros + scale_index(group))));
  }
  const std::uint8_t* step(const lowbit::PanelLayout& l, std::int64_t k) const {
    return panel + l.codes + k / lowbit::kPanelStep * l.step_bytes;
  }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

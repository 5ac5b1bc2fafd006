// The elements of low-bit weights in vector lanes: each type below rounds quotients x = w / scale to what a code stands
// for (value) and to the code itself, exactly as its scalar twin in lowbit/formats.h.
#pragma once

#include <cstdint>

#include "cpu/lowbit_kernels.h"
#include "cpu/simd-inl.h"
#include "lowbit/formats.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// |x| rounded to kMantissa bits behind the point of 2^floor(log2 |x|), ties to even; below `least`, a power of two, to
// the same steps as there. Adding 1.5 * 2^23 steps leaves no room for anything finer.
template <int kMantissa>
HWY_INLINE VF RoundMagnitude(VF magnitude, float least) {
  const DF d;
  const DI di;
  const VI exponent = hn::And(hn::BitCast(di, magnitude), hn::Set(di, 0x7f800000));
  const VF power = hn::BitCast(d, hn::Max(exponent, hn::BitCast(di, hn::Set(d, least))));
  const VF shift = hn::Mul(power, hn::Set(d, 1.5f * (1 << (23 - kMantissa))));
  return hn::Sub(hn::Add(magnitude, shift), shift);
}

struct E2m1Even {
  explicit E2m1Even(VF) {}
  static HWY_INLINE VF Magnitude(VF x) {
    const DF d;
    return hn::Min(RoundMagnitude<1>(hn::Min(hn::Abs(x), hn::Set(d, 8.0f)), 1.0f), hn::Set(d, 6.0f));
  }
  HWY_INLINE VF Value(VF x) const { return hn::CopySignToAbs(Magnitude(x), x); }
  HWY_INLINE VI Code(VF x) const {
    const DF d;
    const DI di;
    const VF magnitude = Magnitude(x);
    // From 1 on the top two bits of the mantissa field and the exponent count up; 0 and 0.5 are codes 0 and 1.
    const VI normal = hn::Sub(hn::ShiftRight<22>(hn::BitCast(di, magnitude)), hn::Set(di, 2 * 127 - 2));
    const VI small = hn::ConvertTo(di, hn::Add(magnitude, magnitude));
    const VI code = hn::IfThenElse(hn::RebindMask(di, hn::Lt(magnitude, hn::Set(d, 1.0f))), small, normal);
    const VI sign = hn::And(hn::ShiftRight<28>(hn::BitCast(di, x)), hn::Set(di, 8));
    return hn::Or(code, sign);
  }
};

// values[i] where i cuts lie below x. kCuts ascend.
template <class Cuts, class Values>
HWY_INLINE VF Climb(VF x, const Cuts& cuts, const Values& values) {
  const DF d;
  VF out = hn::Set(d, values[0]);
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    out = hn::IfThenElse(hn::Gt(x, hn::Set(d, cuts[i])), hn::Set(d, values[i + 1]), out);
  }
  return out;
}

struct E2m1Down {
  explicit E2m1Down(VF) {}
  HWY_INLINE VF Value(VF x) const {
    return hn::CopySignToAbs(Climb(hn::Abs(x), lowbit::E2M1::kCuts, lowbit::E2M1::kMagnitudes), x);
  }
  HWY_INLINE VI Code(VF x) const {
    static constexpr std::array<float, 8> kCodes = {0, 1, 2, 3, 4, 5, 6, 7};
    const DI di;
    const VI code = hn::ConvertTo(di, Climb(hn::Abs(x), lowbit::E2M1::kCuts, kCodes));
    const auto negative =
        hn::And(hn::Lt(hn::BitCast(di, x), hn::Zero(di)), hn::Gt(code, hn::Zero(di)));  // no code for -0
    return hn::Or(code, hn::IfThenElseZero(negative, hn::Set(di, 8)));
  }
};

struct Nf4Lanes {
  explicit Nf4Lanes(VF) {}
  HWY_INLINE VF Value(VF x) const { return Climb(x, lowbit::NF4::kCuts, lowbit::NF4::kValues); }
  HWY_INLINE VI Code(VF x) const {
    static constexpr std::array<float, 16> kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return hn::ConvertTo(DI(), Climb(x, lowbit::NF4::kCuts, kCodes));
  }
};

struct Fp4BnbLanes {
  explicit Fp4BnbLanes(VF) {}
  HWY_INLINE VF Value(VF x) const {
    static constexpr auto kAscending = [] {
      std::array<float, 8> values{};
      for (std::size_t i = 0; i < 8; ++i) values[i] = lowbit::FP4Bnb::kMagnitudes[lowbit::FP4Bnb::kAscending[i]];
      return values;
    }();
    return hn::CopySignToAbs(Climb(hn::Abs(x), lowbit::FP4Bnb::kCuts, kAscending), x);
  }
  HWY_INLINE VI Code(VF x) const {
    static constexpr auto kCodes = [] {
      std::array<float, 8> codes{};
      for (std::size_t i = 0; i < 8; ++i) codes[i] = lowbit::FP4Bnb::kAscending[i];
      return codes;
    }();
    const DF d;
    const DI di;
    const VI code = hn::ConvertTo(di, Climb(hn::Abs(x), lowbit::FP4Bnb::kCuts, kCodes));
    const auto negative = hn::RebindMask(di, hn::Lt(x, hn::Zero(d)));
    return hn::Or(code, hn::IfThenElseZero(negative, hn::Set(di, 8)));
  }
};

struct Int4Lanes {
  explicit Int4Lanes(VF zero_point) : zero(zero_point) {}
  HWY_INLINE VF Shifted(VF x) const {
    const DF d;
    const VF whole = hn::Round(hn::Clamp(x, hn::Set(d, -64.0f), hn::Set(d, 64.0f)));
    return hn::Clamp(hn::Add(whole, zero), hn::Zero(d), hn::Set(d, 15.0f));
  }
  HWY_INLINE VF Value(VF x) const { return hn::Sub(Shifted(x), zero); }
  HWY_INLINE VI Code(VF x) const { return hn::ConvertTo(DI(), Shifted(x)); }
  VF zero;
};

struct Int8Lanes {
  explicit Int8Lanes(VF) {}
  HWY_INLINE VF Value(VF x) const {
    const DF d;
    return hn::Round(hn::Clamp(x, hn::Set(d, -127.0f), hn::Set(d, 127.0f)));
  }
  HWY_INLINE VI Code(VF x) const {
    const DI di;
    return hn::And(hn::ConvertTo(di, Value(x)), hn::Set(di, 255));
  }
};

struct E4m3Lanes {
  explicit E4m3Lanes(VF) {}
  static HWY_INLINE VF Magnitude(VF x) {
    const DF d;
    const VF bounded = hn::Min(hn::Abs(x), hn::Set(d, 500.0f));
    return hn::Min(RoundMagnitude<3>(bounded, 0x1p-6f), hn::Set(d, 448.0f));
  }
  HWY_INLINE VF Value(VF x) const { return hn::CopySignToAbs(Magnitude(x), x); }
  HWY_INLINE VI Code(VF x) const {
    const DF d;
    const DI di;
    const VF magnitude = Magnitude(x);
    const VI normal = hn::ShiftRight<20>(hn::Sub(hn::BitCast(di, magnitude), hn::Set(di, 0x3c000000)));
    const VI small = hn::ConvertTo(di, hn::Mul(magnitude, hn::Set(d, 512.0f)));  // subnormals, in units of 2^-9
    const VI code = hn::IfThenElse(hn::RebindMask(di, hn::Lt(magnitude, hn::Set(d, 0x1p-6f))), small, normal);
    const VI sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, x)), hn::Set(di, 128));
    return hn::Or(code, sign);
  }
};

// Calls action.template operator()<Lanes>() with the type for `element`.
template <class Action>
HWY_INLINE void WithElement(lowbit::Element element, const Action& action) {
  switch (element) {
    case lowbit::Element::e2m1:
      return action.template operator()<E2m1Even>();
    case lowbit::Element::e2m1_row:
      return action.template operator()<E2m1Down>();
    case lowbit::Element::nf4:
      return action.template operator()<Nf4Lanes>();
    case lowbit::Element::fp4_bnb:
      return action.template operator()<Fp4BnbLanes>();
    case lowbit::Element::int4:
      return action.template operator()<Int4Lanes>();
    case lowbit::Element::int8:
      return action.template operator()<Int8Lanes>();
    case lowbit::Element::e4m3:
      return action.template operator()<E4m3Lanes>();
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

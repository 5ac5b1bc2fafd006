// Products of bytes, four to a lane, summed in i32, in one instruction (AVX512_VNNI).
#pragma once

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// What the members are: unit-inl.h.
struct VnniBytes {
  static constexpr int kOffset = 128;
  static HWY_INLINE VI Dot(VI sum, V8 codes, V8 x) { return VI{_mm512_dpbusd_epi32(sum.raw, codes.raw, x.raw)}; }
  static HWY_INLINE VI DotSigned(VI sum, V8 w, V8 x) { return Dot(sum, w, x); }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

// Products of bytes, four to a lane, summed in i32: by the vector instructions that a target has for 16 bits.
#pragma once

#include <cstdint>

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// What the members are: unit-inl.h.
struct Int16Bytes {
  static constexpr int kOffset = 0;

  // A pair of products is at most 24 * 127 * 2, within 16 bits.
  static HWY_INLINE VI Dot(VI sum, V8 codes, V8 x) {
#if HWY_TARGET == HWY_AVX3
    const __m512i pairs = _mm512_maddubs_epi16(codes.raw, x.raw);
    return hn::Add(sum, VI{_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))});
#elif HWY_TARGET == HWY_AVX2
    const __m256i pairs = _mm256_maddubs_epi16(codes.raw, x.raw);
    return hn::Add(sum, VI{_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
#elif HWY_TARGET == HWY_SSE4
    const __m128i pairs = _mm_maddubs_epi16(codes.raw, x.raw);
    return hn::Add(sum, VI{_mm_madd_epi16(pairs, _mm_set1_epi16(1))});
#else
    alignas(16) std::uint8_t a[16];
    alignas(16) std::int8_t b[16];
    alignas(16) std::int32_t out[4];
    hn::Store(codes, D8(), a);
    hn::Store(hn::BitCast(hn::RebindToSigned<D8>(), x), hn::RebindToSigned<D8>(), b);
    for (int i = 0; i < 4; ++i) {
      out[i] = 0;
      for (int j = 4 * i; j < 4 * i + 4; ++j) out[i] += a[j] * b[j];
    }
    return hn::Add(sum, hn::Load(DI(), out));
#endif
  }

  // |w| is at most 128, so that pairs of products fit 16 bits; x takes its sign.
  static HWY_INLINE VI DotSigned(VI sum, V8 w, V8 x) {
#if HWY_TARGET == HWY_AVX3
    const __m512i turned = _mm512_mask_sub_epi8(x.raw, _mm512_movepi8_mask(w.raw), _mm512_setzero_si512(), x.raw);
    return Dot(sum, V8{_mm512_abs_epi8(w.raw)}, V8{turned});
#elif HWY_TARGET == HWY_AVX2
    return Dot(sum, V8{_mm256_abs_epi8(w.raw)}, V8{_mm256_sign_epi8(x.raw, w.raw)});
#elif HWY_TARGET == HWY_SSE4
    return Dot(sum, V8{_mm_abs_epi8(w.raw)}, V8{_mm_sign_epi8(x.raw, w.raw)});
#else
    const hn::RebindToSigned<D8> d8;
    const auto value = hn::BitCast(d8, w), given = hn::BitCast(d8, x);
    const auto turned = hn::IfThenElse(hn::Lt(value, hn::Zero(d8)), hn::Neg(given), given);
    return Dot(sum, hn::BitCast(D8(), hn::Abs(value)), hn::BitCast(D8(), turned));
#endif
  }
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

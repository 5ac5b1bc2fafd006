// Vector helpers of every CPU kernel. A translation unit is one target's: targets/<name>.cc has set HWY_TARGET and
// HEDDLE_TARGET (the namespace) before.
#pragma once

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/dtypes.h"

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;
using D8 = hn::Repartition<std::uint8_t, DF>;
using V8 = hn::Vec<D8>;

constexpr int kLanes = HWY_LANES(float);
constexpr int kRegisters = (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON) ? 32 : 16;
constexpr int kTileN = 3;                // vectors of a tile of the matrix products
constexpr int kGroup = kTileN * kLanes;  // query rows of one tile

// Highway 1.0.3 emulates f16 conversions on these targets, truncating and without infinities; scalar ones serve there.
constexpr bool kVectorF16 = HWY_TARGET != HWY_SSE4 && HWY_TARGET != HWY_EMU128;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;

// 2^x, x <= ~128; relative error below 1.2e-7; 2^-inf = 0, and results below 2^-126 are flushed to 0. NaN stays NaN.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const DI di;
  const auto tiny = hn::Lt(x, hn::Set(d, -126.0f));
  const VF magic = hn::Set(d, 12583039.0f);  // 1.5 * 2^23 + 127: adding it leaves round(x) + 127 in the low bits
  const VF shifted = hn::Add(x, magic);
  const VF r = hn::Sub(x, hn::Sub(shifted, magic));  // in [-0.5, 0.5]
  // Degree 6, Chebyshev-fitted for the relative error on that interval, constant term 1.
  VF p = hn::Set(d, 1.545316294512069e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3390863664671234e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 9.618082557277852e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.550357114219078e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.24022650760568126f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.6931471880262288f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  return hn::IfThenZeroElse(tiny, hn::Mul(p, power));
}

// tanh(x), relative error below 2e-7. Near 0 a polynomial (fitted on |x| < 0.625), elsewhere through exp.
HWY_INLINE VF Tanh(VF x) {
  const DF d;
  const VF ax = hn::Abs(x);
  const VF z = hn::Mul(x, x);
  VF p = hn::Set(d, 2.292744816178142e-3f);
  p = hn::MulAdd(p, z, hn::Set(d, -8.343945515839153e-3f));
  p = hn::MulAdd(p, z, hn::Set(d, 2.176891865102821e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.3959259577204544e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.1333330355691574f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.3333333317214036f));
  const VF near = hn::MulAdd(hn::Mul(p, z), x, x);
  const VF e = Exp2(hn::Mul(hn::Min(ax, hn::Set(d, 20.0f)), hn::Set(d, 2.0f * kLog2e)));
  const VF far = hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
  return hn::IfThenElse(hn::Lt(ax, hn::Set(d, 0.625f)), near, hn::CopySign(far, x));
}

// f32 bits rounded to bf16 (nearest even), as u32 whose high half is the bf16. Finite inputs.
HWY_INLINE VU RoundToBf16(VF x) {
  const DU du;
  const VU bits = hn::BitCast(du, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  return hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
}

// Widens (or copies) `count` elements that are `stride` apart to f32 and fills up to `padded` with zeros.
inline void LoadRow(const std::byte* from, DType dtype, std::int64_t stride, std::int64_t count, std::int64_t padded,
                    float* HWY_RESTRICT to) {
  const DF d;
  std::int64_t i = 0;
  if (stride == 1) {
    if (dtype == DType::f32) {
      const auto* p = reinterpret_cast<const float*>(from);
      for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(d, p + i), d, to + i);
    } else if (dtype == DType::bf16) {
      const hn::Rebind<std::uint16_t, DF> d16;
      const auto* p = reinterpret_cast<const std::uint16_t*>(from);
      for (; i + kLanes <= count; i += kLanes) {
        const VU wide = hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(d16, p + i)));
        hn::StoreU(hn::BitCast(d, wide), d, to + i);
      }
    } else if constexpr (kVectorF16) {
      const hn::Rebind<hwy::float16_t, DF> d16;
      const auto* p = reinterpret_cast<const hwy::float16_t*>(from);
      for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, p + i)), d, to + i);
    }
  }
  for (; i < count; ++i) to[i] = load_element(from, dtype, i * stride);
  for (; i < padded; ++i) to[i] = 0.0f;
}

// The reverse of LoadRow: rounds `count` f32 to `dtype`.
inline void StoreRow(const float* HWY_RESTRICT from, std::int64_t count, std::byte* to, DType dtype,
                     std::int64_t stride) {
  const DF d;
  std::int64_t i = 0;
  if (stride == 1) {
    if (dtype == DType::f32) {
      std::memcpy(to, from, static_cast<std::size_t>(count) * 4);
      return;
    }
    if (dtype == DType::f16) {
      if constexpr (kVectorF16) {
        const hn::Rebind<hwy::float16_t, DF> d16;
        auto* p = reinterpret_cast<hwy::float16_t*>(to);
        for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::DemoteTo(d16, hn::LoadU(d, from + i)), d16, p + i);
      }
    } else {
      const hn::Rebind<std::uint16_t, DF> d16;
      auto* p = reinterpret_cast<std::uint16_t*>(to);
      for (; i + kLanes <= count; i += kLanes) {
        const VF x = hn::LoadU(d, from + i);
        const VU quiet = hn::Set(DU(), 0x7fc00000u);
        const VU bits = hn::IfThenElse(hn::RebindMask(DU(), hn::IsNaN(x)), quiet, RoundToBf16(x));
        hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), d16, p + i);
      }
    }
  }
  for (; i < count; ++i) store_element(to, dtype, i * stride, from[i]);
}

// out[c * out_row + r] = in[r * in_row + c] for 4 rows and 4 columns of 32-bit elements.
template <class T>
HWY_INLINE void Transpose4x4(const T* HWY_RESTRICT in, std::int64_t in_row, T* HWY_RESTRICT out, std::int64_t out_row) {
  const hn::FixedTag<T, 4> d;
  const hn::RepartitionToWide<decltype(d)> dw;
  const auto a = hn::LoadU(d, in), b = hn::LoadU(d, in + in_row);
  const auto c = hn::LoadU(d, in + 2 * in_row), e = hn::LoadU(d, in + 3 * in_row);
  const auto ab0 = hn::BitCast(dw, hn::InterleaveLower(d, a, b)), ab1 = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
  const auto ce0 = hn::BitCast(dw, hn::InterleaveLower(d, c, e)), ce1 = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab0, ce0)), d, out);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab0, ce0)), d, out + out_row);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, ab1, ce1)), d, out + 2 * out_row);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, ab1, ce1)), d, out + 3 * out_row);
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();

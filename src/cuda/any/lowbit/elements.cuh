// The elements of low-bit weights on a GPU: Coder<element>(scale, zero, table) takes a weight to the code nearest to
// w / scale, and a code to what it stands for, to the bit as lowbit/formats.h does. Codes are in the low bits. table:
// what fill_table() has made, in shared memory, where 16 values lie in 16 banks.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/common/ptx/arithmetic.cuh"
#include "lowbit/formats.h"

namespace heddle::cuda::any::lowbit {

using heddle::lowbit::Element;

__device__ inline float quotient(float w, float scale) {
  return scale > 0.0f ? __fdiv_rn(w, scale) : copysignf(0.0f, w);
}

// How many of the ascending constants Cuts::at<0>, Cuts::at<1>... lie below x.
template <class Cuts, std::size_t... kIndex>
__device__ inline unsigned cuts_below(float x, std::index_sequence<kIndex...>) {
  unsigned count = 0;
  ((count += x > Cuts::template at<kIndex> ? 1 : 0), ...);
  return count;
}
template <class Type>
struct CutsOf {
  template <std::size_t kIndex>
  static constexpr float at = Type::kCuts[kIndex];
  static constexpr auto kIndices = std::make_index_sequence<Type::kCuts.size()>();
};

// E2M1: magnitude codes 0 to 7 stand for 0, 0.5, ... 6. Shifted so, a code is a float's exponent and mantissa, 126
// binades down.
__device__ inline float e2m1_value(unsigned code) {
  const float tiny = __uint_as_float((code & 7u) << 22 | (code & 8u) << 28);
  return tiny * 0x1p126f;
}

template <Element kElement>
struct Coder;

template <>
struct Coder<Element::e2m1> {
  // Quotients by 64 s: y = 1 / 64 s rounded, and two steps of Newton's for a y, after which the quotient is rounded
  // correctly (Markstein 1990). That needs numbers of ordinary size: with a scale far from 1 weights are moved by 2^60
  // as it is, which changes no code, as quotients that this would round differently are far below 0.25. Scales that
  // nothing can be divided by give codes of 0.
  __device__ Coder(float scale, float, const float*) : factor(1.0f), divisor(scale * 64.0f) {
    if (!(scale >= 0x1p-90f && scale <= 0x1p90f)) {
      factor = !(scale > 0.0f && scale < INFINITY) ? 0.0f : scale < 1.0f ? 0x1p60f : 0x1p-60f;
      divisor = factor == 0.0f ? 64.0f : scale * factor * 64.0f;
    }
    inverse = __frcp_rn(divisor);
  }
  // |w / s| / 64, of 6 at most; w times `factor`.
  __device__ float magnitude(float w) const {
    float q = w * inverse;
    q = __fmaf_rn(__fmaf_rn(-divisor, q, w), inverse, q);
    q = __fmaf_rn(__fmaf_rn(-divisor, q, w), inverse, q);
    return fminf(fabsf(q), 6.0f / 64.0f);  // an infinity's steps are NaN
  }
  // 2^floor(log2 q), 1 / 64 at least: codes that q may become are half of it apart.
  static __device__ float binade(float q) {
    return __uint_as_float(max(__float_as_uint(q) & 0x7f800000u, 0x3c800000u));
  }
  __device__ unsigned code(float w) const {
    // 1.5 * 2^22 binades are so large that the sum's last bit is half a binade: above the first summand's bits it
    // counts halves, and every binade beyond the first has two codes.
    const float q = magnitude(w * factor), power = binade(q);
    const std::uint32_t shift = __float_as_uint(power) + (22u << 23) + 0x400000u;
    const std::uint32_t sum = __float_as_uint(q + __uint_as_float(shift));
    return (sum - shift + (__float_as_uint(power) >> 22) - 242u) | (__float_as_uint(w) >> 28 & 8u);
  }
  // Eight codes, the first in the lowest bits.
  __device__ std::uint32_t eight(const float* weights) const {
    std::uint32_t codes = 0;
#if __CUDA_ARCH__ >= 890
    // Integers take twice as long as floats: so the rounded quotient, over 64, becomes an e4m3, whose bits 2 to 4 are
    // then the code of its magnitude.
    float w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = weights[j];
    if (factor != 1.0f) {
#pragma unroll
      for (float& x : w) x *= factor;
    }
#pragma unroll
    for (float& x : w) {
      const float q = magnitude(x), power = binade(q);
      x = copysignf(__fmaf_rn(power, -0x1.8p22f, __fmaf_rn(power, 0x1.8p22f, q)), x);
    }
    const std::uint32_t even = ptx::pack4_e4m3(w[0], w[2], w[4], w[6]), odd = ptx::pack4_e4m3(w[1], w[3], w[5], w[7]);
    codes = (even >> 2 & 0x07070707u) | (even >> 4 & 0x08080808u) | (odd << 2 & 0x70707070u) | (odd & 0x80808080u);
#else
#pragma unroll
    for (int j = 0; j < 8; ++j) codes |= code(weights[j]) << 4 * j;
#endif
    return codes;
  }
  __device__ float value(unsigned code) const { return e2m1_value(code); }
  // Of eight codes, as they lie in a word.
  static __device__ void eight_values(std::uint32_t codes, float (&w)[8]) {
#if __CUDA_ARCH__ >= 890
    // The way back: bits 2 to 4 and 7 of bytes, which as e4m3 are 64 times too small.
    const std::uint32_t even = (codes << 2 & 0x1c1c1c1cu) | (codes << 4 & 0x80808080u);
    const std::uint32_t odd = (codes >> 2 & 0x1c1c1c1cu) | (codes & 0x80808080u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(even >> 16 * i));
      const float2 y = ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(odd >> 16 * i));
      w[4 * i] = x.x * 64.0f, w[4 * i + 1] = y.x * 64.0f, w[4 * i + 2] = x.y * 64.0f, w[4 * i + 3] = y.y * 64.0f;
    }
#else
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = e2m1_value(codes >> 4 * j);
#endif
  }
  float factor, divisor, inverse;
};

template <>
struct Coder<Element::e2m1_row> {
  __device__ Coder(float given, float, const float*) : scale(given) {}
  __device__ unsigned code(float w) const {
    using Cuts = CutsOf<heddle::lowbit::E2M1>;
    const float x = quotient(w, scale);
    const unsigned magnitude = cuts_below<Cuts>(fabsf(x), Cuts::kIndices);
    return magnitude != 0 && x < 0 ? magnitude | 8u : magnitude;
  }
  __device__ float value(unsigned code) const { return e2m1_value(code); }
  float scale;
};

template <class Type>
struct ValuesOf {
  template <std::size_t kIndex>
  static constexpr float at = Type{kIndex}.value();
};
template <class Values, std::size_t... kIndex>
__device__ inline float nth(unsigned n, std::index_sequence<kIndex...>) {
  float value = 0.0f;
  ((value = n == kIndex ? Values::template at<kIndex> : value), ...);
  return value;
}

// By the first 16 threads of a block; for elements that have a table.
template <Element kElement>
__device__ inline void fill_table(float* table) {
  if constexpr (kElement == Element::nf4 || kElement == Element::fp4_bnb) {
    using Type = std::conditional_t<kElement == Element::nf4, heddle::lowbit::NF4, heddle::lowbit::FP4Bnb>;
    if (threadIdx.x < 16) table[threadIdx.x] = nth<ValuesOf<Type>>(threadIdx.x, std::make_index_sequence<16>());
    __syncthreads();
  }
}

template <>
struct Coder<Element::nf4> {
  __device__ Coder(float given, float, const float* values) : scale(given), table(values) {}
  __device__ unsigned code(float w) const {
    using Cuts = CutsOf<heddle::lowbit::NF4>;
    return cuts_below<Cuts>(quotient(w, scale), Cuts::kIndices);
  }
  __device__ float value(unsigned code) const { return table[code & 15u]; }
  float scale;
  const float* table;
};

template <>
struct Coder<Element::fp4_bnb> {
  __device__ Coder(float given, float, const float* values) : scale(given), table(values) {}
  __device__ unsigned code(float w) const {
    using Cuts = CutsOf<heddle::lowbit::FP4Bnb>;
    const float x = quotient(w, scale);
    return kAscending >> 4 * cuts_below<Cuts>(fabsf(x), Cuts::kIndices) & 15u | (x < 0 ? 8u : 0u);
  }
  // FP4Bnb::kAscending, four bits each.
  static constexpr std::uint32_t kAscending = [] {
    std::uint32_t nibbles = 0;
    for (unsigned i = 0; i < 8; ++i) nibbles |= std::uint32_t{heddle::lowbit::FP4Bnb::kAscending[i]} << 4 * i;
    return nibbles;
  }();
  __device__ float value(unsigned code) const { return table[code & 15u]; }
  float scale;
  const float* table;
};

template <>
struct Coder<Element::int4> {
  __device__ Coder(float given, float given_zero, const float*) : scale(given), zero(given_zero) {}
  __device__ unsigned code(float w) const {
    return static_cast<unsigned>(fminf(fmaxf(rintf(quotient(w, scale)) + zero, 0.0f), 15.0f));
  }
  __device__ float value(unsigned code) const { return static_cast<float>(code) - zero; }
  float scale, zero;
};

template <>
struct Coder<Element::int8> {
  __device__ Coder(float given, float, const float*) : scale(given) {}
  __device__ unsigned code(float w) const {
    return static_cast<unsigned>(static_cast<int>(fminf(fmaxf(rintf(quotient(w, scale)), -127.0f), 127.0f))) & 255u;
  }
  __device__ float value(unsigned code) const {
    return static_cast<float>(static_cast<int>(static_cast<std::int8_t>(code)));
  }
  float scale;
};

template <>
struct Coder<Element::e4m3> {
  __device__ Coder(float given, float, const float*) : scale(given) {}
  __device__ unsigned code(float w) const {
    return __nv_cvt_float_to_fp8(quotient(w, scale), __NV_SATFINITE, __NV_E4M3);
  }
  __device__ float value(unsigned code) const {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
  }
  float scale;
};

}  // namespace heddle::cuda::any::lowbit

// Arithmetic and roundings.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::cuda::ptx {

// 2^x, largest relative error 2^-22.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to nearest even, `low` in the low half.
template <class T>
__device__ std::uint32_t pack2(float low, float high);

template <>
__device__ inline std::uint32_t pack2<__nv_bfloat16>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ inline std::uint32_t pack2<__half>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four floats as e4m3, rounded to nearest even, saturating; the first in the lowest byte.
__device__ inline std::uint32_t pack4_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// Two 16-bit floats, the low half first.
template <class T>
__device__ float2 unpack2(std::uint32_t words);

template <>
__device__ inline float2 unpack2<__nv_bfloat16>(std::uint32_t words) {
  return {__uint_as_float(words << 16), __uint_as_float(words & 0xFFFF0000)};
}

template <>
__device__ inline float2 unpack2<__half>(std::uint32_t words) {
  return __half22float2(*reinterpret_cast<const __half2*>(&words));
}

// x y + z of both halves, each rounded once (sm_80).
template <class T>
__device__ std::uint32_t fma2(std::uint32_t x, std::uint32_t y, std::uint32_t z);

template <>
__device__ inline std::uint32_t fma2<__nv_bfloat16>(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
  std::uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(z));
  return out;
}

template <>
__device__ inline std::uint32_t fma2<__half>(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
  std::uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(z));
  return out;
}

// (x & mask) | bits, and with ^: one instruction where only one of the two is a constant.
__device__ inline std::uint32_t and_or(std::uint32_t x, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
  return out;
}
__device__ inline std::uint32_t and_xor(std::uint32_t x, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
  return out;
}

// Bits of x where `mask` has them, of y elsewhere.
__device__ inline std::uint32_t select_bits(std::uint32_t x, std::uint32_t y, std::uint32_t mask) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(out) : "r"(x), "r"(mask), "r"(y));
  return out;
}

// Four bytes, by the hexadecimal digits of `which`: 0 to 3 those of x, 4 to 7 zeros, with 8 added 8 times its highest
// bit.
__device__ inline std::uint32_t bytes_of(std::uint32_t x, std::uint32_t which) {
  std::uint32_t out;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(x), "r"(which));
  return out;
}

// ---- E4M3

// The two values in the low half of `pair`, exactly.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t pair) {
  std::uint32_t words;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(words)
      : "r"(pair));
  return words;
}

// Rounded to nearest even; what is beyond 448 becomes 448.
__device__ inline std::uint8_t float_to_e4m3(float x) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<std::uint8_t>(pair);
}

}  // namespace heddle::cuda::ptx

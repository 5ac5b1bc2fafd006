// E2M1 weights and their scales as operands of a product, exactly: a code has 2 bits of mantissa, a scale 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::cuda::sm90::linear_w4a16 {

// What an operand is of the weight, times WeightBlock::kScaleFactor.
template <class T>
constexpr float kOperandFactor = 0;
template <>
constexpr float kOperandFactor<__nv_bfloat16> = 1.0f / 65536;  // magnitudes times 2^-126, scales times 2^110
template <>
constexpr float kOperandFactor<__half> = 1.0f / 16384;  // magnitudes times 2^-14

// Byte `step` of `bytes`, a scale, twice.
template <class T>
__device__ std::uint32_t scale_pair(std::uint32_t bytes, int step);
template <>
__device__ inline std::uint32_t scale_pair<__nv_bfloat16>(std::uint32_t bytes, int step) {
  constexpr std::uint32_t kExponent = 110 + 127 - 15;
  return __byte_perm(bytes, 0, 0x4040 | step << 8 | step) * 16 + (kExponent << 23 | kExponent << 7);
}
template <>
__device__ inline std::uint32_t scale_pair<__half>(std::uint32_t bytes, int step) {
  return __byte_perm(bytes, 0, 0x4040 | step << 8 | step) << 7;
}

template <class T>
__device__ std::uint32_t multiply_pairs(std::uint32_t x, std::uint32_t y);
template <>
__device__ inline std::uint32_t multiply_pairs<__nv_bfloat16>(std::uint32_t x, std::uint32_t y) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
template <>
__device__ inline std::uint32_t multiply_pairs<__half>(std::uint32_t x, std::uint32_t y) {
  std::uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

template <class T>
__device__ void unpack_codes(std::uint32_t q, std::uint32_t (&x)[4]);
template <>
__device__ inline void unpack_codes<__nv_bfloat16>(std::uint32_t q, std::uint32_t (&x)[4]) {
  constexpr std::uint32_t kMask = 0x81C081C0;
  x[0] = q & kMask;
  x[1] = q << 3 & kMask;
  x[2] = q << 6 & kMask;
  x[3] = (q << 1 & 0x80008000) | (q >> 4 & 0x00C000C0) | (q >> 5 & 0x01000100);
}
template <>
__device__ inline void unpack_codes<__half>(std::uint32_t q, std::uint32_t (&x)[4]) {
  constexpr std::uint32_t kSign = 0x80008000, kMagnitude = 0x0E000E00;
  x[0] = (q & kSign) | (q << 3 & kMagnitude);
  x[1] = (q << 3 & kSign) | (q << 6 & kMagnitude);
  x[2] = (q << 6 & kSign) | (q << 9 & kMagnitude);
  x[3] = (q << 1 & kSign) | (q >> 1 & 0x06000600) | (q >> 2 & 0x08000800);
}

// One step's operand. low, high: scale_pair() of the thread's row and of the one 8 further on.
template <class T>
__device__ inline void decode(std::uint32_t q, std::uint32_t low, std::uint32_t high, std::uint32_t (&a)[4]) {
  std::uint32_t x[4];
  unpack_codes<T>(q, x);
  a[0] = multiply_pairs<T>(x[0], low);
  a[1] = multiply_pairs<T>(x[1], high);
  a[2] = multiply_pairs<T>(x[2], low);
  a[3] = multiply_pairs<T>(x[3], high);
}

}  // namespace heddle::cuda::sm90::linear_w4a16

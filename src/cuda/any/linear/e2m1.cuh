// E2M1 weights and their scales as operands of a product, exactly: a code has 2 bits of mantissa, a scale 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "lowbit/fragments.h"

namespace heddle::cuda::linear {

// What an operand is of the weight, times FragmentBlock::kScaleFactor.
template <class T>
constexpr float kOperandFactor = 0;
template <>
constexpr float kOperandFactor<__nv_bfloat16> = 1.0f / 65536;  // magnitudes times 2^-126, scales times 2^110
template <>
constexpr float kOperandFactor<__half> = 1.0f / 16384;  // magnitudes times 2^-14

// Four scales of a row as 16-bit numbers: of steps 0 and 2 in the halves of `even`, of 1 and 3 in those of `odd`.
template <class T>
struct Scales;
template <>
struct Scales<__nv_bfloat16> {
  std::uint32_t even, odd;
  __device__ explicit Scales(std::uint32_t bytes) {
    constexpr std::uint32_t kExponent = (110 + 127 - 15) * 0x00800080u;
    even = __byte_perm(bytes, 0, 0x4240) * 16 + kExponent;
    odd = __byte_perm(bytes, 0, 0x4341) * 16 + kExponent;
  }
};
template <>
struct Scales<__half> {
  std::uint32_t even, odd;
  __device__ explicit Scales(std::uint32_t bytes) {
    even = __byte_perm(bytes, 0, 0x4240) << 7;
    odd = __byte_perm(bytes, 0, 0x4341) << 7;
  }
};

// Both halves of x times half kHalf of y.
template <class T, int kHalf>
__device__ inline std::uint32_t multiply_by_half(std::uint32_t x, std::uint32_t y) {
  std::uint32_t product;
#define HEDDLE_MULTIPLY(type)                                                                              \
  asm("{\n .reg .b16 h<2>;\n .reg .b32 s;\n mov.b32 {h0, h1}, %2;\n mov.b32 s, {h%3, h%3};\n mul.rn." type \
      " %0, %1, "                                                                                          \
      "s;\n}"                                                                                              \
      : "=r"(product)                                                                                      \
      : "r"(x), "r"(y), "n"(kHalf))
  if constexpr (std::is_same_v<T, __half>) {
    HEDDLE_MULTIPLY("f16x2");
  } else {
#if __CUDA_ARCH__ >= 900
    HEDDLE_MULTIPLY("bf16x2");
#else  // products of bfloat16 come with a sum there; -0 changes none
    product = ptx::fma2<T>(x, __byte_perm(y, 0, kHalf == 0 ? 0x1010 : 0x3232), 0x80008000);
#endif
  }
#undef HEDDLE_MULTIPLY
  return product;
}

// Register 3 of a word, sign and magnitude in bits 15 and 8 to 6 of a half, other bits anything: each bit of the
// product is one bit of the word, so that nothing carries.
__device__ inline std::uint32_t register_3(std::uint32_t q) {
  return (q & 0x001B001B) * (1u << 3 | 1u << 8 | 1u << 14);
}

// The codes of a word as numbers, register by register.
template <class T>
__device__ void unpack_codes(std::uint32_t q, std::uint32_t (&x)[4]);
template <>
__device__ inline void unpack_codes<__nv_bfloat16>(std::uint32_t q, std::uint32_t (&x)[4]) {
  constexpr std::uint32_t kBits = 0x81C081C0;
  x[0] = q & kBits;
  x[1] = __funnelshift_r(q, q, 3) & kBits;
  x[2] = __funnelshift_r(q, q, 6) & kBits;
  x[3] = register_3(q) & kBits;
}
template <>
__device__ inline void unpack_codes<__half>(std::uint32_t q, std::uint32_t (&x)[4]) {
  constexpr std::uint32_t kSign = 0x80008000, kMagnitude = 0x0E000E00;
  const std::uint32_t by_3 = __funnelshift_r(q, q, 3), by_6 = __funnelshift_r(q, q, 6), last = register_3(q);
  x[0] = (q & kSign) | (q << 3 & kMagnitude);
  x[1] = (by_3 & kSign) | (q & kMagnitude);
  x[2] = (by_6 & kSign) | (by_3 & kMagnitude);
  x[3] = (last & kSign) | (last << 3 & kMagnitude);
}

// What a thread of a warpgroup has of half a block, as it is stored.
struct HalfBlock {
  uint4 codes;
  std::uint32_t low, high;  // scales of the thread's row and of the one 8 further on
};

// Where thread number `thread` finds that: in a block at 0, half 0; bytes.
__device__ inline int codes_at(int thread) { return thread * 16; }
__device__ inline int scales_at(int thread) {
  return static_cast<int>(offsetof(lowbit::FragmentBlock, scales)) + (thread / 32 * 16 + thread % 32 / 4) * 8;
}
// codes, scales: of the first half, addresses in shared memory.
__device__ inline HalfBlock load_half(std::uint32_t codes, std::uint32_t scales, int half) {
  constexpr int kHalfCodes = sizeof(lowbit::FragmentBlock::codes[0]), kRow = sizeof(lowbit::FragmentBlock::scales[0]);
  return {ptx::load_shared_16(codes + half * kHalfCodes), ptx::load_shared_4(scales + half * (kRow / 2)),
          ptx::load_shared_4(scales + 8 * kRow + half * (kRow / 2))};
}

// Operands of steps 2 kPair and 2 kPair + 1 of half a block.
template <class T, int kPair>
__device__ inline void decode(const HalfBlock& half, std::uint32_t (&operands)[2][4]) {
  const Scales<T> low(half.low), high(half.high);
  std::uint32_t even[4], odd[4];
  unpack_codes<T>(kPair == 0 ? half.codes.x : half.codes.z, even);
  unpack_codes<T>(kPair == 0 ? half.codes.y : half.codes.w, odd);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    operands[0][i] = multiply_by_half<T, kPair>(even[i], i % 2 == 0 ? low.even : high.even);
    operands[1][i] = multiply_by_half<T, kPair>(odd[i], i % 2 == 0 ? low.odd : high.odd);
  }
}

}  // namespace heddle::cuda::linear

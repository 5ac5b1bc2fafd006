// E2M1 weights as E4M3 operands of a product: of mxfp4 and e2m1_row exactly, of nvfp4 rounded to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/ptx/arithmetic.cuh"
#include "lowbit/fragments.h"

namespace heddle::cuda::sm90::linear_w4a8 {

// E4M3 bytes of the eight magnitudes of a group, as words look them up. Bit 7 of a byte may be anything.
struct Magnitudes {
  std::uint32_t low, high;
};

// Where a row's scales are, and what two of them, as they lie, make of a word's magnitudes. kFactor: of sums, for the
// row scale. Of the table's multiplications no byte carries into the next.
template <class Block>
struct GroupScales;

// 0, 0.5, 1, 1.5 and 2, 3, 4, 6, times 2^(exponent - 5).
template <>
struct GroupScales<lowbit::FragmentBlock8> {
  static constexpr float kFactor = 32;
  static constexpr int kRowBytes = sizeof(lowbit::FragmentBlock8::exponents[0]), kHalfBytes = 2;

  static __device__ const std::byte* at(const lowbit::FragmentBlock8& block, int row, int /*thread*/) {
    return reinterpret_cast<const std::byte*>(block.exponents[row]);
  }
  static __device__ Magnitudes first(std::uint32_t two) { return of(two & 0xFF); }
  static __device__ Magnitudes second(std::uint32_t two) { return of(two >> 8); }

 private:
  static __device__ Magnitudes of(std::uint32_t exponent) {
    return {exponent * 0x08080800 + 0x14100800, exponent * 0x08080808 + 0x24201C18};
  }
};

// With a scale of bits b and of 1.5 times as much b + 5 or, where bit 7 is set, b + 4: 0, b - 8, b, b + 5 - bit and
// b + 8, b + 16, b + 13 - bit, b + 21 - bit. Bit 7 is spread over the two upper bytes, which then are -2^16: times the
// factors that is -1 in the last byte and in the last two, where 1.5 times as much stand.
template <>
struct GroupScales<lowbit::ScaledBlock8> {
  static constexpr float kFactor = 1;
  static constexpr int kRowBytes = sizeof(lowbit::ScaledBlock8::scales[0]),
                       kHalfBytes = sizeof(lowbit::ScaledBlock8::scales[0][0]);

  static __device__ const std::byte* at(const lowbit::ScaledBlock8& block, int row, int thread) {
    return reinterpret_cast<const std::byte*>(block.scales[row][0][thread % 4 / 2]);
  }
  static __device__ Magnitudes first(std::uint32_t two) { return of(ptx::bytes_of(two, 0x8840)); }
  static __device__ Magnitudes second(std::uint32_t two) { return of(ptx::bytes_of(two, 0x9941)); }

 private:
  static __device__ Magnitudes of(std::uint32_t scale) {
    return {scale * 0x01010100 + 0x04FFF800, scale * 0x01010101 + 0x150D1008};
  }
};

// The two registers of a row in an operand.
__device__ inline void widen(std::uint32_t q, const Magnitudes& m, std::uint32_t& first, std::uint32_t& second) {
  constexpr std::uint32_t kSigns = 0x80808080;
  const std::uint32_t which = q & 0x77777777;
  first = ptx::select_bits(q, __byte_perm(m.low, m.high, which), kSigns);
  second = ptx::select_bits(q << 4, __byte_perm(m.low, m.high, which >> 16), kSigns);
}

}  // namespace heddle::cuda::sm90::linear_w4a8

// E2M1 weights as E4M3 operands of a product, exactly.
#pragma once

#include <cstdint>

namespace heddle::cuda::sm90::linear_w4a8 {

// E4M3 bytes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, times 2^(exponent - 5).
struct Magnitudes {
  std::uint32_t low, high;
  __device__ explicit Magnitudes(std::uint32_t exponent)
      : low(exponent * 0x08080800 + 0x14100800), high(exponent * 0x08080808 + 0x24201C18) {}
};

// The two registers of a row in an operand.
__device__ inline void widen(std::uint32_t q, const Magnitudes& m, std::uint32_t& first, std::uint32_t& second) {
  constexpr std::uint32_t kSigns = 0x80808080;
  const std::uint32_t which = q & 0x77777777;
  first = __byte_perm(m.low, m.high, which) | (q & kSigns);
  second = __byte_perm(m.low, m.high, which >> 16) | (q << 4 & kSigns);
}

}  // namespace heddle::cuda::sm90::linear_w4a8

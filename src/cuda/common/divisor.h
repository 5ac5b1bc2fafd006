// Division by a number that a whole launch shares.
#pragma once

#include <bit>
#include <cstdint>

namespace heddle::cuda {

// Quotients of numbers below 2^31 without a division (Granlund and Montgomery, PLDI 1994).
struct Divisor {
  unsigned divisor = 1, factor = 1;
  int shift = 0;
  Divisor() = default;
  explicit Divisor(unsigned d) : divisor(d), shift(static_cast<int>(std::bit_width(d - 1))) {
    factor = static_cast<unsigned>(((std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - d)) / d + 1);
  }
  constexpr unsigned quotient(unsigned n) const {
    return (static_cast<unsigned>(std::uint64_t{n} * factor >> 32) + n) >> shift;
  }
  constexpr int quotient(int n) const { return static_cast<int>(quotient(static_cast<unsigned>(n))); }
};

}  // namespace heddle::cuda

// What orders of fragments make of E2M1 codes, where they have no room for a scale: for packing, and for telling what
// it changed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "lowbit/formats.h"
#include "lowbit/fragments.h"
#include "lowbit/matrix.h"

namespace heddle::lowbit {

// Sign and magnitude of element (row, column); 0 where there is none.
inline unsigned code_at(const Matrix& m, std::int64_t row, std::int64_t column) {
  if (row >= m.N || column >= m.K) return 0;
  const NibblePair pair{m.codes[row * m.row_bytes + column / 2]};
  return (column % 2 == 0) == m.format.high_nibble_first ? pair.high() : pair.low();
}

// Of scales in e8m0 and of non-negative ones in e4m3, as stored; 0 in a row without columns.
inline std::uint8_t largest_scale(const Matrix& m, std::int64_t row) {
  const auto* scales = static_cast<const std::uint8_t*>(m.scales) + row * m.groups;
  return m.groups == 0 ? std::uint8_t{0} : *std::max_element(scales, scales + m.groups);
}

// FragmentBlock8: of a code whose scale is 2^exponent of the least that its row can have.
inline unsigned under_least(unsigned code, int exponent) {
  return E2M1::nearest(std::ldexp(E2M1{static_cast<std::uint8_t>(code)}.value(), exponent)).code;
}

// An E4M3 scale that is not 0 as (1 + m / 8) 2^e: 8 (e + 7) + m, which of a normal number are its bits.
inline int wide_bits(std::uint8_t e4m3) {
  if (e4m3 >= 8) return e4m3;
  const int width = std::bit_width(static_cast<unsigned>(e4m3));
  return 8 * (width - 3) + (e4m3 << (4 - width)) % 8;
}
// What such bits stand for, of any exponent.
inline float value_of_wide(int bits) { return std::ldexp(1.0f + static_cast<float>(bits & 7) / 8, (bits >> 3) - 7); }

// ScaledBlock8: binades by which the row's scale is above the global one.
inline int row_shift(std::uint8_t largest) {
  const int above = largest == 0 ? 0 : wide_bits(largest) - ScaledBlock8::kMost;
  return above > 0 ? (above + 7) / 8 : above / 8;
}
// Of a code whose scale has fewer bits than kLeast.
inline unsigned under_least_bits(unsigned code, int bits) {
  const float of_least = value_of_wide(bits) / value_of_wide(ScaledBlock8::kLeast);
  return E2M1::nearest(E2M1{static_cast<std::uint8_t>(code)}.value() * of_least).code;
}

}  // namespace heddle::lowbit

// How a group of numbers becomes 4-bit codes. The same on every device: a difference and a quotient are rounded once.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtypes.h"

namespace heddle {

constexpr float kInt4Largest = 15.0f, kLargestF16 = 65504.0f;

// Least and largest of a group, held to what float16 has; NaN if a number is not finite.
struct Int4Range {
  float low = kLargestF16, high = -kLargestF16;
  bool finite = true;

  void add(float x) {
    finite &= std::isfinite(x);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
};

// Code c stands for zero + c * scale; both are float16 numbers.
struct Int4Scale {
  float zero, scale;

  explicit Int4Scale(const Int4Range& range) {
    const float low = range.low < -kLargestF16 ? -kLargestF16 : range.low;
    const float high = range.high > kLargestF16 ? kLargestF16 : range.high;
    zero = range.finite ? f16_to_f32(f32_to_f16(low)) : std::numeric_limits<float>::quiet_NaN();
    scale = high > zero ? f16_to_f32(f32_to_f16((high - zero) / kInt4Largest)) : 0.0f;
  }

  std::uint8_t code(float x) const {
    if (!(scale > 0)) return 0;
    const float nearest = std::nearbyint((x - zero) / scale);
    return nearest >= kInt4Largest ? 15 : nearest > 0 ? static_cast<std::uint8_t>(nearest) : 0;
  }
};

}  // namespace heddle

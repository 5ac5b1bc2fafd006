// The narrow formats' conversions, every value there is of them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/dtypes.h"

namespace heddle {
namespace {

// The definition: (-1)^s 2^(e - 7) (1 + m / 8), or 2^-6 m / 8 for e = 0; all ones is NaN.
double f8e4m3(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

TEST(F8e4m3, EveryValueWidensAndComesBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const float wide = f8e4m3_to_f32(static_cast<std::uint8_t>(bits));
    if (std::isnan(f8e4m3(bits))) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_TRUE(std::isnan(f8e4m3_to_f32(f32_to_f8e4m3(wide)))) << bits;
      continue;
    }
    EXPECT_EQ(static_cast<double>(wide), f8e4m3(bits)) << bits;
    EXPECT_EQ(std::signbit(wide), bits >= 128) << bits;
    EXPECT_EQ(f32_to_f8e4m3(wide), bits);
  }
}

TEST(F8e4m3, NarrowsToTheNearestAndTiesToEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const double low = f8e4m3(bits), high = f8e4m3(bits + 1), middle = (low + high) / 2;  // exact in f32
    const auto tie = static_cast<float>(middle);
    const int even = bits % 2 == 0 ? bits : bits + 1;
    for (int sign : {0, 0x80}) {
      const float factor = sign != 0 ? -1.0f : 1.0f;
      EXPECT_EQ(f32_to_f8e4m3(factor * tie), even | sign) << bits;
      EXPECT_EQ(f32_to_f8e4m3(factor * std::nextafter(tie, 0.0f)), bits | sign) << bits;
      EXPECT_EQ(f32_to_f8e4m3(factor * std::nextafter(tie, 1000.0f)), (bits + 1) | sign) << bits;
    }
  }
}

TEST(F8e4m3, WhatIsTooLargeSaturates) {
  for (const float large : {449.0f, 464.0f, 1e9f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(f32_to_f8e4m3(large), 0x7e);
    EXPECT_EQ(f32_to_f8e4m3(-large), 0xfe);
  }
}

}  // namespace
}  // namespace heddle

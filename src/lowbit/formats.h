// Elements and scales of the low-bit formats, to the bit, one at a time. Everything faster is tested against this.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/dtypes.h"
#include "heddle/lowbit.h"

namespace heddle::lowbit {

// Two 4-bit codes. Column 2j is in the low half, except in formats that say high_nibble_first.
struct NibblePair {
  std::uint8_t byte;

  constexpr std::uint8_t low() const { return byte & 15u; }
  constexpr std::uint8_t high() const { return byte >> 4; }
  static constexpr NibblePair of(unsigned low, unsigned high) {
    return {static_cast<std::uint8_t>((low & 15u) | (high << 4))};
  }
};
static_assert(sizeof(NibblePair) == 1);

// S E E M, exponent bias 1, subnormal 0.5, no infinity, no NaN.
struct E2M1 {
  std::uint8_t code;  // low 4 bits

  static constexpr std::array<float, 8> kMagnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  // Halfway between magnitudes i and i + 1.
  static constexpr std::array<float, 7> kCuts = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

  constexpr float value() const { return (code & 8u) != 0 ? -kMagnitudes[code & 7u] : kMagnitudes[code & 7u]; }
  // Nearest, ties to the even code, 6 beyond 6; the sign bit is x's.
  static constexpr E2M1 nearest(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
    std::uint32_t code = 0;
    for (std::uint32_t i = 0; i < 7; ++i) code += i % 2 == 0 ? magnitude > kCuts[i] : magnitude >= kCuts[i];
    return {static_cast<std::uint8_t>(code | (bits >> 31) << 3)};
  }
  // Nearest, ties to the lower magnitude; zero is code 0.
  static constexpr E2M1 nearest_ties_down(float x) {
    const float magnitude = x < 0 ? -x : x;
    std::uint32_t code = 0;
    for (const float cut : kCuts) code += magnitude > cut;
    return {static_cast<std::uint8_t>(code != 0 && x < 0 ? code | 8u : code)};
  }
};
static_assert(sizeof(E2M1) == 1);

// E4M3 of the OCP 8-bit formats, as an element, and, non-negative, as a scale.
struct E4M3 {
  std::uint8_t bits;

  constexpr float value() const { return f8e4m3_to_f32(bits); }
  static constexpr E4M3 nearest(float x) { return {f32_to_f8e4m3(x)}; }
};
static_assert(sizeof(E4M3) == 1);

// A power of two, 2^(bits - 127); 255 is NaN.
struct E8M0 {
  std::uint8_t bits;

  constexpr float value() const {
    if (bits == 255) return std::bit_cast<float>(0x7fc00000u);
    return std::bit_cast<float>(bits == 0 ? 0x00400000u : static_cast<std::uint32_t>(bits) << 23);
  }
  // 2^exponent, saturating.
  static constexpr E8M0 power(int exponent) {
    return {static_cast<std::uint8_t>(exponent < -127 ? 0 : exponent > 127 ? 254 : exponent + 127)};
  }
};
static_assert(sizeof(E8M0) == 1);

// The largest f32 that is not above halfway from a to b, so that `x > cut` is exact for every f32 x.
constexpr float cut_between(float a, float b) {
  const double middle = (static_cast<double>(a) + b) / 2;
  const auto rounded = static_cast<float>(middle);
  if (rounded <= middle) return rounded;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rounded) + (rounded > 0 ? -1u : 1u));
}
template <std::size_t kCount>
constexpr std::array<float, kCount - 1> cuts_between(const std::array<float, kCount>& ascending) {
  std::array<float, kCount - 1> cuts{};
  for (std::size_t i = 0; i + 1 < kCount; ++i) cuts[i] = cut_between(ascending[i], ascending[i + 1]);
  return cuts;
}

// NormalFloat 4. Values as QLoRA publishes them: quantiles of N(0, 1), scaled to [-1, 1], with an exact 0.
struct NF4 {
  std::uint8_t code;  // low 4 bits

  static constexpr std::array<float, 16> kValues = {-1.0f,
                                                    -0.6961928009986877f,
                                                    -0.5250730514526367f,
                                                    -0.39491748809814453f,
                                                    -0.28444138169288635f,
                                                    -0.18477343022823334f,
                                                    -0.09105003625154495f,
                                                    0.0f,
                                                    0.07958029955625534f,
                                                    0.16093020141124725f,
                                                    0.24611230194568634f,
                                                    0.33791524171829224f,
                                                    0.44070982933044434f,
                                                    0.5626170039176941f,
                                                    0.7229568362236023f,
                                                    1.0f};
  static constexpr std::array<float, 15> kCuts = cuts_between(kValues);

  constexpr float value() const { return kValues[code & 15u]; }
  // Nearest, ties to the lower value.
  static constexpr NF4 nearest(float x) {
    std::uint32_t code = 0;
    for (const float cut : kCuts) code += x > cut;
    return {static_cast<std::uint8_t>(code)};
  }
};
static_assert(sizeof(NF4) == 1);

// bitsandbytes' FP4: bit 3 is the sign, the magnitudes are those below in this order. Not E2M1.
struct FP4Bnb {
  std::uint8_t code;  // low 4 bits

  static constexpr std::array<float, 8> kMagnitudes = {0.0f,      0.0625f / 12, 8.0f / 12, 1.0f,
                                                       4.0f / 12, 6.0f / 12,    2.0f / 12, 3.0f / 12};
  static constexpr std::array<std::uint8_t, 8> kAscending = {0, 1, 6, 7, 4, 5, 2, 3};  // codes by magnitude
  static constexpr std::array<float, 7> kCuts =
      cuts_between(std::array<float, 8>{kMagnitudes[0], kMagnitudes[1], kMagnitudes[6], kMagnitudes[7], kMagnitudes[4],
                                        kMagnitudes[5], kMagnitudes[2], kMagnitudes[3]});

  constexpr float value() const { return (code & 8u) != 0 ? -kMagnitudes[code & 7u] : kMagnitudes[code & 7u]; }
  // Nearest, ties to the lower magnitude; every x < 0 has the sign bit.
  static constexpr FP4Bnb nearest(float x) {
    const float magnitude = x < 0 ? -x : x;
    std::uint32_t rank = 0;
    for (const float cut : kCuts) rank += magnitude > cut;
    return {static_cast<std::uint8_t>(kAscending[rank] | (x < 0 ? 8u : 0u))};
  }
};
static_assert(sizeof(FP4Bnb) == 1);

// The zero point of INT4 where none is stored.
constexpr float kInt4Zero = 8.0f;

// Of rows and of columns.
constexpr std::int64_t kLargestExtent = (std::int64_t{1} << 31) - 1;

constexpr int bits_of(Element element) { return element == Element::int8 || element == Element::e4m3 ? 8 : 4; }

// What the largest weight of a group is to become under the plain rule.
constexpr float largest_of(Element element) {
  switch (element) {
    case Element::e2m1:
    case Element::e2m1_row:
      return 6.0f;
    case Element::int4:
      return 7.0f;
    case Element::int8:
      return 127.0f;
    case Element::e4m3:
      return 448.0f;
    default:
      return 1.0f;
  }
}

// The magnitude that weights of the format may have. Of a range around zero the largest weight is at least half, so
// that this holds with zero points too.
constexpr float weight_limit(const Format& format) {
  return format.scale == ScaleType::f16 ? 65504.0f * largest_of(Element::int4) : std::numeric_limits<float>::max();
}

constexpr DType code_dtype(Element element) {
  if (element == Element::int8) return DType::i8;
  return element == Element::e4m3 ? DType::f8e4m3 : DType::u8;
}

constexpr DType scale_dtype(ScaleType type) {
  switch (type) {
    case ScaleType::f32:
      return DType::f32;
    case ScaleType::f16:
      return DType::f16;
    case ScaleType::e4m3:
      return DType::f8e4m3;
    default:
      return DType::u8;
  }
}

template <class Scale>
constexpr std::array<float, 256> all_values() {
  std::array<float, 256> values{};
  for (unsigned bits = 0; bits < 256; ++bits) values[bits] = Scale{static_cast<std::uint8_t>(bits)}.value();
  return values;
}
inline constexpr std::array<float, 256> kE4M3Values = all_values<E4M3>(), kE8M0Values = all_values<E8M0>();

// What a code stands for, without its scale.
inline float value_of(Element element, std::uint8_t code, float zero) {
  switch (element) {
    case Element::e2m1:
    case Element::e2m1_row:
      return E2M1{code}.value();
    case Element::nf4:
      return NF4{code}.value();
    case Element::fp4_bnb:
      return FP4Bnb{code}.value();
    case Element::int4:
      return static_cast<float>(code) - zero;
    case Element::int8:
      return static_cast<float>(static_cast<std::int8_t>(code));
    case Element::e4m3:
      return E4M3{code}.value();
  }
  return 0;
}

// Scale `index` of an array, without a global scale.
inline float load_scale(const void* scales, ScaleType type, std::int64_t index) {
  switch (type) {
    case ScaleType::f32:
      return static_cast<const float*>(scales)[index];
    case ScaleType::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(scales)[index]);
    case ScaleType::e4m3:
      return kE4M3Values[static_cast<const std::uint8_t*>(scales)[index]];
    default:
      return kE8M0Values[static_cast<const std::uint8_t*>(scales)[index]];
  }
}

}  // namespace heddle::lowbit

// Conversions between f32 and the narrower floating-point formats, round to nearest even, on the CPU, scalar.
#pragma once

#include <bit>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle {

constexpr float bf16_to_f32(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

constexpr std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// In integers, since not every compiler here has _Float16.
constexpr float f16_to_f32(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude < 0x400u) {  // zero and subnormals: units of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  if (magnitude < 0x7c00u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  return std::bit_cast<float>(sign | 0x7f800000u | (magnitude << 13) | quiet);
}

constexpr std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint16_t>((bits & 0x80000000u) >> 16);
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14; a sum in [0.5, 1) is rounded to units of 2^-24
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// E4M3 of the OCP 8-bit formats: bias 7, subnormals in units of 2^-9, no infinity, NaN 0x7f.
constexpr float f8e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8u) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
}

// Saturates: what is beyond 448, infinities included, becomes 448.
constexpr std::uint8_t f32_to_f8e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  std::uint32_t narrow;
  if (magnitude > 0x7f800000u) {
    narrow = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {  // 448
    narrow = 0x7eu;
  } else if (magnitude < 0x3c800000u) {  // below 2^-6; a sum in [2^14, 2^15) is rounded to units of 2^-9
    narrow = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0f) - 0x46800000u;
  } else {
    narrow = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  }
  return static_cast<std::uint8_t>(sign | narrow);
}

// The scale of a row of an e4m3 cache whose largest magnitude is `largest`: that one is stored as 448. A row of zeros
// has the least normal number, so that nothing is divided by 0, and one with infinities, which saturate, a finite
// scale.
constexpr float row_scale(float largest) {
  constexpr float kLargest = 448.0f, kLeast = kLargest * 0x1p-126f, kMost = 0x1.fffffep127f;
  return (largest > kMost ? kMost : largest > kLeast ? largest : kLeast) / kLargest;
}

// Element `index` of an array of one of the floating-point dtypes, widened.
inline float load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case DType::f8e4m3:
      return f8e4m3_to_f32(static_cast<const std::uint8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline void store_element(void* data, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::f16:
      static_cast<std::uint16_t*>(data)[index] = f32_to_f16(value);
      return;
    case DType::bf16:
      static_cast<std::uint16_t*>(data)[index] = f32_to_bf16(value);
      return;
    case DType::f8e4m3:
      static_cast<std::uint8_t*>(data)[index] = f32_to_f8e4m3(value);
      return;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace heddle

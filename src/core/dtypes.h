// Conversions between f32 and the 16-bit floating-point formats, round to nearest even, on the CPU, scalar.
#pragma once

#include <bit>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle {

inline float bf16_to_f32(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(std::uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }

inline std::uint16_t f32_to_f16(float value) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)); }

// Element `index` of an f32, f16 or bf16 array, widened.
inline float load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16:
      return bf16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
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
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace heddle

// e4m3 to 16-bit floats, in pairs. Exact; a NaN stays one where the GPU has an instruction for it (sm_89), else it
// reads as 480.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::cuda {

// Four e4m3 values, as two registers of two T: elements 0 and 1, and 2 and 3.
template <class T>
__device__ void widen_e4m3(std::uint32_t four, std::uint32_t& low, std::uint32_t& high);

#if __CUDA_ARCH__ >= 890

namespace detail {
__device__ inline std::uint32_t half2_of_e4m3(std::uint16_t two) {
  std::uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(two));
  return out;
}
}  // namespace detail

template <>
__device__ inline void widen_e4m3<__half>(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  low = detail::half2_of_e4m3(static_cast<std::uint16_t>(four));
  high = detail::half2_of_e4m3(static_cast<std::uint16_t>(four >> 16));
}

template <>
__device__ inline void widen_e4m3<__nv_bfloat16>(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  const auto widened = [](std::uint16_t two) {
    const std::uint32_t bits = detail::half2_of_e4m3(two);
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x.x, x.y);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  };
  low = widened(static_cast<std::uint16_t>(four));
  high = widened(static_cast<std::uint16_t>(four >> 16));
}

#else

namespace detail {
// Sign and magnitude where T has them: the value times 2^-kDown, whose exponent bias is larger. kShift: from the top of
// a 16-bit half down to T's exponent and mantissa.
template <int kShift, std::uint32_t kMagnitude>
__device__ inline std::uint32_t placed(std::uint32_t halves) {
  return (halves & 0x80008000u) | (halves >> kShift & kMagnitude);
}
}  // namespace detail

template <>
__device__ inline void widen_e4m3<__half>(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  const auto widened = [](std::uint32_t halves) {
    const std::uint32_t bits = detail::placed<1, 0x3f803f80u>(halves);
    const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));
    return *reinterpret_cast<const std::uint32_t*>(&x);
  };
  low = widened(__byte_perm(four, 0, 0x1404));
  high = widened(__byte_perm(four, 0, 0x3424));
}

template <>
__device__ inline void widen_e4m3<__nv_bfloat16>(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  const auto widened = [](std::uint32_t halves) {
    const std::uint32_t bits = detail::placed<4, 0x07f007f0u>(halves);
    const __nv_bfloat162 x = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(0x1p120f));
    return *reinterpret_cast<const std::uint32_t*>(&x);
  };
  low = widened(__byte_perm(four, 0, 0x1404));
  high = widened(__byte_perm(four, 0, 0x3424));
}

#endif

}  // namespace heddle::cuda

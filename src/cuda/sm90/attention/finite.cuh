// Whether tiles hold what no product may meet: zero times NaN, or times infinity, is not zero.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace heddle::cuda::sm90::attention {

// The bits that are all set in NaN and infinity.
template <class T>
struct Exponent;
template <>
struct Exponent<__nv_bfloat16> {
  static constexpr unsigned kMask = 0x7F80;
};
template <>
struct Exponent<__half> {
  static constexpr unsigned kMask = 0x7C00;
};

// Whether 16-bit words hold a NaN or an infinity: adding one to an exponent of all ones carries into the sign's place.
template <class T>
__device__ inline std::uint32_t not_finite(const uint4& words) {
  constexpr std::uint32_t kExponents = Exponent<T>::kMask * 0x10001u,
                          kOne = (Exponent<T>::kMask & -Exponent<T>::kMask) * 0x10001u;
  std::uint32_t carries = 0;
  for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) carries |= (word & kExponents) + kOne;
  return carries & 0x80008000u;
}

}  // namespace heddle::cuda::sm90::attention

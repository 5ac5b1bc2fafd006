// int8_row and fp8_row: codes as they are, exactly; the row's scale is applied to the sums.
#pragma once

#include "cuda/sm80/linear/decode/codes.cuh"

namespace heddle::cuda::sm80::linear {

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;

// From bytes kFirst and kFirst + 1 of code + 128.
template <class T>
struct FromInt8 {
  static constexpr float kFactor = 1;
  const std::uint32_t signs = ptx::pinned(0x80808080);

  template <int kFirst>
  __device__ std::uint32_t widen(std::uint32_t bytes) const {
    constexpr unsigned kWhich = kFirst == 0 ? 0x4140 : 0x4342;
    if constexpr (kIsHalf<T>) {  // 1024 + 128 + code
      constexpr std::uint32_t kOne = 0x3C003C00, kMinus1152 = 0xE480E480;
      return ptx::fma2<T>(__byte_perm(bytes, 0x64646464, kWhich), kOne, kMinus1152);
    } else {  // 128 and the lower bits, less 256 or, where the highest bit is set, 128
      constexpr std::uint32_t kOne = 0x3F803F80;
      const std::uint32_t x = __byte_perm(bytes, 0x43434343, kWhich);
      return ptx::fma2<T>(x & 0xFF7FFF7F, kOne, ptx::and_xor(x, 0xFF80FF80, signs));
    }
  }
};

// From bytes of e4m3: sign, 4 bits of exponent and 3 of mantissa go to their places, and the exponent's bias is mended.
template <class T>
struct FromE4M3 {
  static constexpr float kFactor = kIsHalf<T> ? 256 : 1;
  template <int kFirst>
  __device__ std::uint32_t widen(std::uint32_t bytes) const {
    constexpr std::uint32_t kSigns = 0x80008000;
    const std::uint32_t x = __byte_perm(bytes, 0, kFirst == 0 ? 0x1404 : 0x3424);
    if constexpr (kIsHalf<T>) {
      return (x & kSigns) | (x >> 1 & 0x3F803F80);  // times 2^-8, which leaves the least subnormal one
    } else {
      constexpr std::uint32_t kPower = 0x7B807B80, kMinusZero = 0x80008000;  // 2^120
      return ptx::fma2<T>((x & kSigns) | (x >> 4 & 0x07F007F0), kPower, kMinusZero);
    }
  }
};

template <class T, template <class> class From>
struct Bytes {
  using Element = T;
  using Piece = uint4;
  using Group = NoGroup;
  static constexpr int kBlockColumns = lowbit::block_layout({.element = lowbit::Element::int8}).columns;
  static constexpr int kBlockBytes = sizeof(lowbit::FragmentCodes), kPiecePairs = 1;
  static constexpr bool kGroups = false;
  static constexpr float kFactor = From<T>::kFactor;
  static constexpr bool kTable = false;

  __device__ Bytes(const Params&, std::uint32_t) {}
  __device__ Piece load(std::uint32_t block, int n) const { return codes.load(block, n); }
  __device__ void decode(const Piece& piece, Group, int /*pair*/, std::uint32_t (&a)[2][4]) const {
    const std::uint32_t words[2][2] = {{piece.x, piece.y}, {piece.z, piece.w}};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = words[step][i / 2];
        a[step][i] = i % 2 == 0 ? from.template widen<0>(word) : from.template widen<2>(word);
      }
    }
  }

 private:
  const Codes codes;
  const From<T> from{};
};

template <class T>
using Int8 = Bytes<T, FromInt8>;
template <class T>
using E4M3 = Bytes<T, FromE4M3>;

}  // namespace heddle::cuda::sm80::linear

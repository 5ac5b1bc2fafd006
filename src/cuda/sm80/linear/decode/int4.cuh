// int4 with and without zero points: code - zero, exactly, of rows whose groups have scales in float16.
#pragma once

#include "cuda/sm80/linear/decode/codes.cuh"
#include "lowbit/formats.h"

namespace heddle::cuda::sm80::linear {

// A code in the lowest bits of a number whose last place is 1 is that number plus the code.
template <class T>
struct Int4 {
  using Element = T;
  using Piece = uint4;
  struct Group {
    std::uint32_t minus[2];  // of rows r and r + 8: what is to be subtracted
  };
  static constexpr int kBlockColumns = lowbit::kBlockColumns, kPiecePairs = 2;
  static constexpr int kBlockBytes =
      lowbit::block_layout(
          {.element = lowbit::Element::int4, .scale = lowbit::ScaleType::f16, .group = 32, .zero_points = true})
          .bytes;
  static constexpr bool kGroups = true;
  static constexpr float kFactor = 1;
  static constexpr bool kTable = false;

  __device__ Int4(const Params& params, std::uint32_t) : zeros(params.zeros) {}
  __device__ Piece load(std::uint32_t block, int n) const { return codes.load(block, n); }

  __device__ Group group(std::uint32_t block, int n) const {
    if (zeros == 0) return symmetric;
    const std::uint32_t at = block + zeros + n * lowbit::kBlockRows + row;
    return minus(static_cast<float>(ptx::load_shared_1(at)), static_cast<float>(ptx::load_shared_1(at + 8)));
  }
  __device__ float2 scales(std::uint32_t block, int n) const { return group_scales<__half>(block, row, n); }

  __device__ void decode(const Piece& piece, const Group& group, int pair, std::uint32_t (&a)[2][4]) const {
    widen(pair == 0 ? piece.x : piece.z, group, a[0]);
    widen(pair == 0 ? piece.y : piece.w, group, a[1]);
  }

 private:
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr float kFirst = kHalf ? 1024 : 128, kSecond = kHalf ? 64 : 128;

  __device__ static Group minus(float zero, float other) {
    return {ptx::pack2<T>(-(kFirst + zero), -(kFirst + zero)), ptx::pack2<T>(-(kSecond + other), -(kSecond + other))};
  }

  __device__ void widen(std::uint32_t q, const Group& group, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHalf) {  // 1024 + code, or 1024 + 16 code, a sixteenth of which is 64 + code
        constexpr std::uint32_t kOne = 0x3C003C00, kSixteenth = 0x2C002C00;
        const std::uint32_t sum = ptx::and_or(i < 2 ? q : q >> 8, i % 2 == 0 ? 0x000F000F : 0x00F000F0, base);
        a[i] = ptx::fma2<T>(sum, i % 2 == 0 ? kOne : kSixteenth, group.minus[i % 2]);
      } else {  // 128 + code
        constexpr std::uint32_t kOne = 0x3F803F80;
        a[i] = ptx::fma2<T>(ptx::and_or(q >> 4 * i, 0x000F000F, base), kOne, group.minus[i % 2]);
      }
    }
  }

  const Codes codes;
  const int zeros;
  const Group symmetric = minus(lowbit::kInt4Zero, lowbit::kInt4Zero);
  const std::uint32_t row = ptx::pinned(row_in_block()), base = ptx::pinned(kHalf ? 0x64006400 : 0x43004300);
};

}  // namespace heddle::cuda::sm80::linear

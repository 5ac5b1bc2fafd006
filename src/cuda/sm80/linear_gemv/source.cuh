// A lane's share of a block of weights, from global memory to operands.
#pragma once

#include "cuda/any/linear/e2m1.cuh"
#include "cuda/common/ptx/once.cuh"

namespace heddle::cuda::sm80::linear_gemv {

// nvfp4, mxfp4 and e2m1_row.
template <class T>
struct E2M1 {
  using Element = T;
  static constexpr int kBlockColumns = lowbit::kBlockColumns;
  static constexpr int kBlockBytes = sizeof(lowbit::FragmentBlock), kPairs = kBlockColumns / 32;
  static constexpr float kFactor = 1.0f / (cuda::linear::kOperandFactor<T> * lowbit::FragmentBlock::kScaleFactor);

  struct Registers {
    uint4 codes[2];
    uint2 low, high;  // scales of rows r and r + 8
  };

  // thread: of 128, whose share this lane has.
  __device__ explicit E2M1(int thread)
      : first(cuda::linear::codes_at(thread)), scales(cuda::linear::scales_at(thread) - first) {}

  // Where the share begins in the first block.
  __device__ const std::byte* begin(const std::byte* blocks) const { return blocks + first; }

  __device__ __forceinline__ Registers load(const std::byte* share) const {
    constexpr int kHalfCodes = sizeof(lowbit::FragmentBlock::codes[0]), kRow = sizeof(lowbit::FragmentBlock::scales[0]);
    return {{ptx::load_once_16(share), ptx::load_once_16(share + kHalfCodes)},
            ptx::load_once_8(share + scales),
            ptx::load_once_8(share + scales + 8 * kRow)};
  }

  // Of two steps, 32 columns.
  template <int kPair>
  __device__ static __forceinline__ void decode(const Registers& from, std::uint32_t (&a)[2][4]) {
    constexpr int kHalf = kPair / 2;
    const cuda::linear::HalfBlock half{from.codes[kHalf], kHalf == 0 ? from.low.x : from.low.y,
                                       kHalf == 0 ? from.high.x : from.high.y};
    cuda::linear::decode<T, kPair % 2>(half, a);
  }

 private:
  const int first, scales;  // bytes, from the block and from there
};

}  // namespace heddle::cuda::sm80::linear_gemv

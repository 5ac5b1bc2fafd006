// nvfp4, mxfp4 and e2m1_row: weights with their scales, exactly.
#pragma once

#include "cuda/any/linear/e2m1.cuh"
#include "cuda/sm80/linear/decode/codes.cuh"

namespace heddle::cuda::sm80::linear {

using cuda::linear::codes_at, cuda::linear::HalfBlock, cuda::linear::kOperandFactor, cuda::linear::load_half,
    cuda::linear::scales_at, cuda::linear::this_thread;

template <class T>
struct E2M1 {
  using Element = T;
  using Piece = HalfBlock;
  using Group = NoGroup;
  static constexpr int kBlockColumns = lowbit::kBlockColumns, kBlockBytes = sizeof(lowbit::FragmentBlock);
  static constexpr int kPiecePairs = 2;
  static constexpr bool kGroups = false;
  static constexpr float kFactor = 1.0f / (kOperandFactor<T> * lowbit::FragmentBlock::kScaleFactor);
  static constexpr bool kTable = false;

  __device__ E2M1(const Params&, std::uint32_t) {}
  __device__ Piece load(std::uint32_t block, int n) const { return load_half(block + codes, block + scales, n); }
  __device__ void decode(const Piece& piece, Group, int pair, std::uint32_t (&a)[2][4]) const {
    if (pair == 0) {
      cuda::linear::decode<T, 0>(piece, a);
    } else {
      cuda::linear::decode<T, 1>(piece, a);
    }
  }

 private:
  const std::uint32_t codes = ptx::pinned(codes_at(this_thread())), scales = ptx::pinned(scales_at(this_thread()));
};

}  // namespace heddle::cuda::sm80::linear

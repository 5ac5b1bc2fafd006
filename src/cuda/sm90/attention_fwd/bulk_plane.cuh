// A bias or mask with rows as the tensor memory accelerator brings it: from a warpgroup's tile to a warp's scores.
#pragma once

#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_fwd/scores.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// s unit + bias. warp_row: the warp's first row in the tile.
template <class C>
__device__ __forceinline__ void add_bulk_bias(const BulkTile<C>& tile, int warp_row, float unit,
                                              float (&s)[C::kTileK / 2]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
  const std::byte* row = tile.bytes + (warp_row + lane % 16) * (kPanel * 2);
#pragma unroll
  for (int m = 0; m < C::kTileK / 16; ++m) {
    std::uint32_t words[4];  // (row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)
    ptx::load_matrix_x4(words, row + m / 4 * (kRows * kPanel * 2) + 16 * ((m % 4 * 2 + lane / 16) ^ (lane % 8)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = to_float2<typename C::Element>(words[i]);
      float* x = s + 8 * m + 2 * i;
      x[0] = fmaf(x[0], unit, pair.x);
      x[1] = fmaf(x[1], unit, pair.y);
    }
  }
}

// Bit g of byte b of word r: whether the mask is true at row lane / 4 + 8 r, column 16 g + 4 (lane % 4) + b. Unless
// kAnyValue, true must be 1. Returns whether it was all the same.
template <class C, bool kAnyValue>
__device__ __forceinline__ bool read_bulk_mask(const std::byte* row, std::uint32_t (&bits)[2]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
  std::uint32_t all = 0;
  bits[0] = bits[1] = 0;
#pragma unroll
  for (int i = 0; i < C::kTileK / 32; ++i) {
    std::uint32_t words[4];  // columns 32 i and on: row, row + 8; 16 further: row, row + 8
    ptx::load_matrix_x4(words, row + 16 * ((2 * i + lane / 16) ^ (lane % 8)));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (kAnyValue) words[e] = (((words[e] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[e]) >> 7 & 0x01010101;
      all |= words[e];
      bits[e % 2] += words[e] << (2 * i + e / 2);
    }
  }
  return (all & 0xfefefefe) == 0;
}

// ldmatrix gives a lane four neighbours of every 16 columns, the accumulators are two and two: of the four lanes of a
// row, each fetches the bytes it needs.
template <class C>
__device__ __forceinline__ void remove_by_bulk_mask(const BulkTile<C>& tile, int warp_row, float (&s)[C::kTileK / 2]) {
  static_assert(C::kTileK == 128);
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;
  const std::byte* row = tile.bytes + (warp_row + lane % 16) * C::kTileK;
  std::uint32_t bits[2];
  if (!__all_sync(0xffffffff, read_bulk_mask<C, false>(row, bits))) read_bulk_mask<C, true>(row, bits);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int from = lane / 4 * 4 + lane % 4 / 2;
    const std::uint32_t left = __shfl_sync(0xffffffff, bits[r], from),
                        right = __shfl_sync(0xffffffff, bits[r], from + 2);
    bits[r] = __byte_perm(left, right, lane % 2 == 0 ? 0x5410 : 0x7632);
  }
  if (__all_sync(0xffffffff, (bits[0] & bits[1]) == 0xffffffff)) return;
    // Now bit g of byte 2 h + c is column 16 g + 8 h + 2 (lane % 4) + c.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int g = 0; g < C::kTileK / 16; ++g) {
        if ((bits[r] & 1u << (8 * b + g)) == 0) s[8 * g + 4 * (b / 2) + 2 * r + b % 2] = -INFINITY;
      }
    }
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

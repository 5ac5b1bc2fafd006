// Warps and shared memory.
#pragma once

#include "cuda/sm80/linear_gemv/variants.h"

namespace heddle::cuda::sm80::linear_gemv {

constexpr int kSlabRows = 16, kTokens = 8;  // M and N of mma.m16n8k16

// S: what reads and decodes the weights.
template <class S, Tiles kTiles>
struct Config {
  using Source = S;
  using Element = typename S::Element;
  using Output = Element;
  static constexpr int kSlabs = kTiles.slabs, kGroups = kTiles.groups, kThreads = 32 * kSlabs * kGroups;
  static constexpr int kResident = 1024 / kThreads;  // CTAs of a multiprocessor, as registers allow
  static constexpr int kAhead = 2;                   // blocks of a warp whose loads are on their way
  static constexpr bool kTokenScales = false;
  static constexpr float kFactor = S::kFactor;
};

// In front of x.
template <class C>
struct alignas(128) SharedMemory {
  float4 sums[C::kGroups][C::kSlabs][32];
  typename C::Output staging[C::kSlabs][16][16];
};

// A row of x, 16 bytes further than a multiple of 128, so that the same columns of 8 rows meet all banks.
constexpr std::int64_t x_pitch(std::int64_t k_blocks, int block_columns) { return k_blocks * block_columns * 2 + 16; }

}  // namespace heddle::cuda::sm80::linear_gemv

// What the kernel for neighbouring lists together takes, and is told.
#pragma once

#include <cuda.h>

#include "cuda/common/sparse_fwd/params.h"

namespace heddle::cuda::sm90::sparse_fwd::together {

constexpr int kLists = cuda::sparse_fwd::kListsTogether, kMostEntries = cuda::sparse_fwd::kMostEntriesTogether,
              kMostBlocks = cuda::sparse_fwd::kMostBlocksTogether;

struct Params : cuda::sparse_fwd::Params {
  // [B, S, Hkv, D], innermost first: D, S, Hkv, B. Packed sequences: B = 1, S is the total.
  CUtensorMap k, v;
  int tiles;  // of kLists lists each, of a head unit

  // Words that hold a bit for each block of a sequence.
  constexpr std::int64_t words(const Sequence& s) const {
    const std::int64_t bits = 32 * problem.lists.block_size;
    return (s.sk + bits - 1) / bits;
  }
  // Of step n over the numbered blocks, each of which has one or two tiles of keys: which lists meet it, and its first
  // key in the sequence.
  __device__ std::uint32_t named(const std::uint32_t* blocks, int n) const { return blocks[n >> (subs - 1)]; }
  __device__ int first_key(const std::uint32_t* blocks, int n) const {
    const auto block = static_cast<int>(named(blocks, n) >> 16);
    return (block << block_log2) + (n & (subs - 1)) * cuda::sparse_fwd::kTileKeys;
  }
};

}  // namespace heddle::cuda::sm90::sparse_fwd::together

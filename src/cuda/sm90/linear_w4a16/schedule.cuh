// Which parts of which tiles a CTA has, one after the other.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm90/linear_w4a16/params.h"

namespace heddle::cuda::sm90::linear_w4a16 {

// The first unit of CTA number `cta`. There are fewer than 2^31 / grid units to share.
__device__ inline int first_unit(const Schedule& s, int cta) {
  return s.shared_tiles * s.k_blocks * cta / static_cast<int>(gridDim.x);
}

// So that the compiler computes from it again what it has no registers to keep.
__device__ inline int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Part {
  int token, row_block;  // the tile's first of each
  int begin, end;        // blocks of columns; none: there is no such part
};

// Part number `n` of this CTA. Of the shared tiles the last one first: so what others wait for is there early. Computed
// from the launch alone, so that none of it stays in registers meanwhile.
template <class C>
__device__ inline Part part_of(const Schedule& s, int n) {
  const int cta = static_cast<int>(blockIdx.x), first = first_unit(s, cta), last = first_unit(s, cta + 1);
  const int first_tile = first / s.k_blocks, shared = last > first ? (last - 1) / s.k_blocks - first_tile + 1 : 0;
  Part part{};
  int tile;
  if (n < shared) {
    tile = first_tile + shared - 1 - n;
    part.begin = max(first - tile * s.k_blocks, 0);
    part.end = min(last - tile * s.k_blocks, s.k_blocks);
  } else {
    tile = s.shared_tiles + cta + (n - shared) * static_cast<int>(gridDim.x);
    part.end = tile < s.tiles ? s.k_blocks : 0;
  }
  part.token = tile / s.row_tiles * C::kTokens;
  part.row_block = tile % s.row_tiles * (C::kConsumers * C::kRowBlocks);
  return part;
}

// How many blocks of columns that is.
template <class C>
__device__ inline int blocks_of(const Schedule& s, int n) {
  const Part part = part_of<C>(s, n);
  return part.end - part.begin;
}

// Sums of one warpgroup, the rest of whose tile other CTAs have.
template <class C>
using Sums = float[C::kRowBlocks][C::kAccumulators];

template <class C>
__device__ inline float4* partials_of(const Schedule& s, int cta, int consumer) {
  return s.partials +
         static_cast<std::int64_t>(cta * C::kConsumers + consumer) * (C::kRowBlocks * (C::kAccumulators / 4) * 128) +
         threadIdx.x % 128;
}

template <class C>
__device__ inline void leave_partials(const Schedule& s, int consumer, const Sums<C>& sums) {
  const int cta = static_cast<int>(blockIdx.x);
  float4* to = partials_of<C>(s, cta, consumer);
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i, to += 128) {
      const float* const x = sums[block] + 4 * i;
      *to = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  __threadfence();
  ptx::barrier_sync(1 + consumer, 128);
  if (threadIdx.x % 128 == 0) ptx::store_release(s.marks + cta * C::kConsumers + consumer, s.mark);
}

// Adds what the CTAs before this one have of the tile, of the first `blocks` of its columns. They have started, and
// wait for nobody before they leave it.
template <class C>
__device__ inline void add_partials(const Schedule& s, int blocks, int consumer, Sums<C>& sums) {
  int cta = static_cast<int>(blockIdx.x);
#pragma unroll 1
  while (blocks > 0) {
    --cta;
    blocks -= first_unit(s, cta + 1) - first_unit(s, cta);
    std::uint64_t* const mark = s.marks + cta * C::kConsumers + consumer;
    if (threadIdx.x % 128 == 0) {
      while (ptx::load_acquire(mark) != s.mark) {
      }
    }
    ptx::barrier_sync(1 + consumer, 128);
    const float4* from = partials_of<C>(s, cta, consumer);
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators / 4; ++i, from += 128) {
        const float4 x = __ldcg(from);
        float* const to = sums[block] + 4 * i;
        to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
      }
    }
    ptx::barrier_sync(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) *mark = 0;  // for the next launch in this memory
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

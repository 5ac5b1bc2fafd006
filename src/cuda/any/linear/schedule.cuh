// Which parts of which tiles a CTA has, one after the other, and how CTAs that share a tile add up.
#pragma once

#include "cuda/any/linear/params.h"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/flags.cuh"
#include "cuda/common/recomputed.cuh"

namespace heddle::cuda::linear {

__device__ inline int this_cta() { return recomputed(static_cast<int>(blockIdx.x)); }
__device__ inline int this_thread() { return recomputed(static_cast<int>(threadIdx.x)) % 128; }

// The first unit of CTA number `cta`. There are fewer than 2^31 / grid units to share.
__device__ inline int first_unit(const Schedule& s, int cta) {
  return s.shared_tiles * s.units * cta / static_cast<int>(gridDim.x);
}
__device__ inline int first_tile(const Schedule& s, int cta) { return first_unit(s, cta) / s.units; }
// How many tiles CTA number `cta` shares.
__device__ inline int shared_parts(const Schedule& s, int cta) {
  const int end = first_unit(s, cta + 1);
  return end > first_unit(s, cta) ? (end - 1) / s.units - first_tile(s, cta) + 1 : 0;
}
// Which CTA has a unit.
__device__ inline int cta_of(const Schedule& s, int unit) {
  return ((unit + 1) * static_cast<int>(gridDim.x) - 1) / (s.shared_tiles * s.units);
}

struct Part {
  int token, row_block;  // the tile's first of each
  int begin, end;        // units; none: there is no such part
};

// Part number `n` of this CTA.
template <class C>
__device__ inline Part part_of(const Schedule& s, int n) {
  const int cta = this_cta(), shared = shared_parts(s, cta);
  Part part{};
  int tile;
  if (n < shared) {
    tile = first_tile(s, cta) + n;
    part.begin = max(first_unit(s, cta) - tile * s.units, 0);
    part.end = min(first_unit(s, cta + 1) - tile * s.units, s.units);
  } else {
    tile = s.shared_tiles + cta + (n - shared) * static_cast<int>(gridDim.x);
    part.end = tile < s.tiles ? s.units : 0;
  }
  part.token = tile / s.row_tiles * C::kTokens;
  part.row_block = tile % s.row_tiles * C::kTileBlocks;
  return part;
}

// Sums of one warpgroup.
template <class C>
using Sums = float[C::kRowBlocks][C::kAccumulators];

// Accumulators of a slice: of 16 tokens, or of all there are.
template <class C>
constexpr int kSliceSums = C::kAccumulators < 8 ? C::kAccumulators : 8;
template <class C>
constexpr int kSlices = C::kAccumulators / kSliceSums<C>;

// What warpgroup `group` of CTA `cta` has of its shared tile number `part`.
template <class C>
__device__ inline float4* partials_of(const Schedule& s, int cta, int part, int group, int thread) {
  constexpr int kOfGroup = C::kRowBlocks * (C::kAccumulators / 4) * 128;
  return s.partials + static_cast<std::int64_t>((cta * 2 + part) * C::kRowGroups + group) * kOfGroup + thread;
}
template <class C>
__device__ inline std::uint64_t* marks_of(const Schedule& s, int cta, int part, int group) {
  return s.marks + ((cta * 2 + part) * C::kRowGroups + group) * kSlices<C>;
}

template <class C>
__device__ inline void leave_partials(const Schedule& s, int part, int group, const Sums<C>& sums) {
  const int cta = this_cta(), thread = this_thread();
  float4* to = partials_of<C>(s, cta, part, group, thread);
#pragma unroll
  for (int block = 0; block < C::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i, to += 128) {
      const float* const x = sums[block] + 4 * i;
      __stcg(to, make_float4(x[0], x[1], x[2], x[3]));
    }
  }
  ptx::barrier_sync(1 + group, 128);  // the release covers what others have written before it
  if (thread < kSlices<C>) ptx::store_release(marks_of<C>(s, cta, part, group) + thread, s.mark);
}

// Calls store(tile, block of rows, slice, sums) for what this CTA finishes of the tiles that it shares. The others have
// started, and wait for nobody before they leave theirs.
template <class C, class Store>
__device__ inline void finish_shares(const Schedule& s, int group, Store store) {
  constexpr int kWords = kSliceSums<C> / 4;
  const int cta = this_cta(), thread = this_thread();
#pragma unroll 1
  for (int tile = first_tile(s, cta), end = tile + shared_parts(s, cta); tile < end; ++tile) {
    const int first = cta_of(s, tile * s.units), count = cta_of(s, (tile + 1) * s.units - 1) - first + 1;
    const int first_slice = first + count - 1 - cta, slices = (kSlices<C> - first_slice + count - 1) / count;
    const auto part_of_tile = [&](int other) { return tile - first_tile(s, other); };
#pragma unroll 1
    for (int i = thread; i < count * slices; i += 128) {
      const int other = first + i % count, slice = first_slice + i / count * count;
      std::uint64_t* const mark = marks_of<C>(s, other, part_of_tile(other), group) + slice;
      while (ptx::load_acquire(mark) != s.mark) {
      }
      *mark = 0;  // for the next launch in this memory
    }
    ptx::barrier_sync(1 + group, 128);
    const auto load = [&](int other, int item, float4(&x)[kWords]) {
      const int place = item / slices * kSlices<C> + first_slice + item % slices * count;
      const float4* const from = partials_of<C>(s, other, part_of_tile(other), group, thread) + place * (kWords * 128);
#pragma unroll
      for (int i = 0; i < kWords; ++i) x[i] = __ldcg(from + 128 * i);
    };
    // Of several items the first two's are asked for at once: what is on its way bounds the rate.
    constexpr int kAtOnce = C::kConsumerRegisters > 200 ? 4 : 2;
    const int items = C::kRowBlocks * slices;
#pragma unroll 1
    for (int begin = 0; begin < items; begin += kAtOnce) {
      float4 one[kAtOnce][kWords], two[kAtOnce][kWords];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = min(begin + i, items - 1);
        load(first, item, one[i]);
        load(first + min(1, count - 1), item, two[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = begin + i;
        if (item >= items) break;
        float sums[kSliceSums<C>] = {};
        const auto add = [&](const float4(&x)[kWords]) {
#pragma unroll
          for (int j = 0; j < kWords; ++j) {
            sums[4 * j] += x[j].x, sums[4 * j + 1] += x[j].y, sums[4 * j + 2] += x[j].z, sums[4 * j + 3] += x[j].w;
          }
        };
        add(one[i]);
        if (count > 1) add(two[i]);
#pragma unroll 4
        for (int other = first + 2; other < first + count; ++other) {
          float4 x[kWords];
          load(other, item, x);
          add(x);
        }
        store(tile, item / slices, first_slice + item % slices * count, sums);
      }
    }
  }
}

}  // namespace heddle::cuda::linear

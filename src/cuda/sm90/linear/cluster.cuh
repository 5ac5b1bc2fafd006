// How the CTAs of a cluster that share a tile add up: each leaves its sums in its shared memory, and finishes some of
// the tile's tokens.
#pragma once

#include "cuda/any/linear/epilogue.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear {

using cuda::linear::Epilogue, cuda::linear::first_row_of_warp, cuda::linear::kSliceSums, cuda::linear::Part,
    cuda::linear::part_of, cuda::linear::Sums, cuda::linear::kSlices, cuda::linear::this_thread;

// Warpgroup `group` of those that finish sums, after the CTA's only part.
template <class C, class Shared>
__device__ __forceinline__ void finish_in_cluster(const Output& out, const Schedule& s, Shared& shared, int group,
                                                  const Sums<C>& sums) {
  constexpr int kWords = kSliceSums<C> / 4, kItems = C::kRowBlocks * kSlices<C>, kWarpgroup = 128;
  constexpr int kAtOnce = 2;  // items that are added up: what is on its way bounds the rate
  static_assert(sizeof(shared.x) + sizeof(shared.weights) >= C::kRowGroups * sizeof(Sums<C>) * kWarpgroup);
  // All stages have been read once all are here: warpgroups with other columns came to gather() before.
  ptx::barrier_sync(1 + 3 * C::kRowGroups, kWarpgroup * C::kRowGroups);
  const int thread = this_thread(), rank = ptx::cluster_rank();
  float4* const partials = reinterpret_cast<float4*>(shared.x) + group * (kItems * kWords * kWarpgroup) + thread;
#pragma unroll
  for (int i = 0; i < kItems * kWords; ++i) {
    const float* const x = sums[i / (C::kAccumulators / 4)] + 4 * i % C::kAccumulators;
    partials[i * kWarpgroup] = make_float4(x[0], x[1], x[2], x[3]);
  }
  ptx::cluster_meet();
  const Part part = part_of<C>(s, 0);
  const int end = min(out.m, part.token + C::kTokens);
  const std::uint32_t first = ptx::shared_address(partials);
#pragma unroll 1
  for (int begin = rank; begin < kItems; begin += kAtOnce * s.cluster) {
    float all[kAtOnce][kSliceSums<C>] = {};
#pragma unroll 2
    for (int other = 0; other < s.cluster; ++other) {
      const std::uint32_t from = ptx::remote_address(first, other);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = min(begin + i * s.cluster, kItems - 1);
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const float4 x =
              ptx::load_remote_float4(from + (item * kWords + word) * (kWarpgroup * static_cast<int>(sizeof(float4))));
          float* const to = all[i] + 4 * word;
          to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = begin + i * s.cluster;
      const int row_block = part.row_block + group * C::kRowBlocks + item / kSlices<C>;
      if (item >= kItems || row_block >= s.row_blocks) break;
      Epilogue<C>(out, first_row_of_warp(row_block), shared.staging[group * 4 + thread / 32])
          .store(part.token + 16 * (item % kSlices<C>), end, all[i]);
    }
  }
  ptx::cluster_meet();  // until then the others may read
}

}  // namespace heddle::cuda::sm90::linear

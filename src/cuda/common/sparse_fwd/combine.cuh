// A row's partial results, in the order of its list's slots, joined: o and lse.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/sparse_fwd/params.h"
#include "cuda/common/sparse_fwd/rows_out.cuh"

namespace heddle::cuda::sparse_fwd {

constexpr int kCombineThreads = 256;

// Row `within` of a list, of which kHead / 8 lanes have a piece each. place(part): where a partial result is;
// says_used(part, used): whether it is there, of a row that is used or not.
template <class T, int kHead, class Place, class Says>
__device__ __forceinline__ void join_parts(const Params& p, std::int64_t list, std::int64_t unit, std::int64_t within,
                                           int lane, int parts, Place place, Says says_used) {
  constexpr int kLanes = kHead / 8, kBatch = 4;
  const unsigned mine = (kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1) << (threadIdx.x % kWarp / kLanes * kLanes);
  const sparse::Index::Place w = p.place(list);
  const std::int64_t i = w.row + within / p.group, h = unit * p.group + within % p.group;
  if (!w.there || i >= w.s.q_rows) return;
  const bool used = i < w.s.sq;
  const float sink = used ? sink_of(p, h) : -INFINITY;
  const auto says = [&](int part) { return says_used(part, used); };

  float top = sink;
  for (int part = lane; part < parts; part += kLanes) {
    if (says(part)) top = fmaxf(top, p.lse[place(part)]);
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(mine, top, lanes));

  // A NaN is no maximum, but stays one in the sums.
  const float base = top == -INFINITY ? 0.0f : top;
  float total = 0.0f, o[8] = {};
  for (int first = 0; first < parts; first += kBatch) {
    uint4 piece[kBatch];
    float lse[kBatch], scale[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      lse[n] = -INFINITY;
      scale[n] = 0.0f;
      piece[n] = make_uint4(0, 0, 0, 0);
      if (first + n < parts && says(first + n)) {
        lse[n] = p.lse[place(first + n)];
        scale[n] = p.scales[place(first + n) * (kHead / 32) + lane / 4];
        piece[n] = reinterpret_cast<const uint4*>(p.partial + place(first + n) * kHead)[lane];
      }
    }
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const float weight = lse[n] == -INFINITY ? 0.0f : exp_of_difference(lse[n], base), factor = weight * scale[n];
      total += weight;
      if (weight == 0.0f) continue;
      const std::uint32_t words[4] = {piece[n].x, piece[n].y, piece[n].z, piece[n].w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float2 two = ptx::unpack2<__half>(words[t]);
        o[2 * t] = fmaf(factor, two.x, o[2 * t]);
        o[2 * t + 1] = fmaf(factor, two.y, o[2 * t + 1]);
      }
    }
  }
  if (sink != -INFINITY) total += exp_of_difference(sink, base);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  if (lane == 0) write_lse(p, w.b, w.s, i, h, total == 0.0f ? -INFINITY : base + __logf(total));
#pragma unroll
  for (float& x : o) x = inverse == 0.0f ? 0.0f : x * inverse;
  write_piece<T>(p, w.b, w.s, i, h, lane, o);
}

template <class T, int kHead>
__global__ void __launch_bounds__(kCombineThreads, 3) combine_kernel(const __grid_constant__ Params p) {
  constexpr int kLanes = kHead / 8;
  const std::int64_t row = (std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x) / kLanes;
  const std::int64_t at = row / p.rows, within = row - at * p.rows;
  if (at >= p.count * p.units) return;
  join_parts<T, kHead>(
      p, p.first + at / p.units, at % p.units, within, static_cast<int>(threadIdx.x) % kLanes, p.parts,
      [&](int part) { return (at * p.parts + part) * p.rows + within; },
      [&](int part, bool used) {
        if (!used || p.by_rows) return used;
        return p.place_of[at * p.slots + (p.subs == 1 ? part : part / p.subs)] >= 0;
      });
}

}  // namespace heddle::cuda::sparse_fwd

// A row's partial results, in the order of its list's slots, joined: o and lse.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/sparse_fwd/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

constexpr int kCombineThreads = 256;

// kHead / 8 lanes have a row, each a piece of it as store_rows() writes them.
template <class T, int kHead>
__global__ void __launch_bounds__(kCombineThreads, 3) combine_kernel(const __grid_constant__ Params p) {
  constexpr int kLanes = kHead / 8, kBatch = 4;
  const SparseProblem& problem = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t row = (std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x) / kLanes;
  const unsigned mine = (kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1) << (threadIdx.x % kWarp / kLanes * kLanes);
  const std::int64_t at = row / p.rows, within = row - at * p.rows;
  if (at >= p.count * p.units) return;
  const std::int64_t unit = at % p.units;
  const sparse::Index::Place w = p.place(p.first + at / p.units);
  const std::int64_t i = w.row + within / p.group, h = unit * p.group + within % p.group;
  if (!w.there || i >= w.s.q_rows) return;
  const bool used = i < w.s.sq;
  const float sink = problem.sink.data != nullptr && used
                         ? reinterpret_cast<const float*>(problem.sink.data)[h * problem.sink.stride_h]
                         : -INFINITY;
  const int parts = p.slots * p.subs;  // each a slot's tile of keys
  const auto place = [&](int part) { return (at * parts + part) * p.rows + within; };
  const auto says = [&](int part) {
    return used && p.place_of[at * p.slots + (p.subs == 1 ? part : part / p.subs)] >= 0;
  };

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
  if (problem.lse.data != nullptr && lane == 0) {
    reinterpret_cast<float*>(problem.lse.data)[problem.lse.offset(w.b, h, w.s.q_begin + i)] =
        total == 0.0f ? -INFINITY : base + __logf(total);
  }
  const Operand& to = problem.o;
  std::byte* const out = to.at(w.b, w.s.q_begin + i, h);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int d = lane / 4 * 32 + 8 * t + 2 * (lane % 4);
    const float x = inverse == 0.0f ? 0.0f : o[2 * t] * inverse, y = inverse == 0.0f ? 0.0f : o[2 * t + 1] * inverse;
    if (d >= problem.Dv) continue;  // Dv is a multiple of 8
    if (to.dtype == DType::f32) {
      reinterpret_cast<float*>(out)[d * to.stride_d] = x;
      reinterpret_cast<float*>(out)[(d + 1) * to.stride_d] = y;
    } else if (p.o_pairs) {
      *reinterpret_cast<std::uint32_t*>(out + 2 * d) = ptx::pack2<T>(x, y);
    } else {
      reinterpret_cast<T*>(out)[d * to.stride_d] = static_cast<T>(x);
      reinterpret_cast<T*>(out)[(d + 1) * to.stride_d] = static_cast<T>(y);
    }
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

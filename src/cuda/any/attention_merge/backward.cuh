// The gradients of a merge. A group of p.lanes lanes has a row, and all of its elements; p.slots is p.lanes.
#pragma once

#include "cuda/any/attention_merge/row.cuh"

namespace heddle::cuda::any::attention_merge {

// Elements of a row that a lane has, as floats.
template <int kCount, int kPieces>
struct LaneElements {
  float x[kPieces][kCount] = {};

  template <class T>
  __device__ void load(const Rows& from, const Place& at, int column, int columns, int size) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int d = column + piece * columns;
      if (d >= size) continue;
      const auto elements = attention_merge::load<T, kCount>(from, at, d);
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[piece][k] = static_cast<float>(elements.element[k]);
    }
  }
  template <class T>
  __device__ void store_times(float factor, bool counts, const Rows& to, const Place& at, int column, int columns,
                              int size) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int d = column + piece * columns;
      if (d >= size) continue;
      float out[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) out[k] = counts ? factor * x[piece][k] : 0.0f;
      attention_merge::store<T, kCount>(to, at, d, out);
    }
  }
  // Over the row, the same in each of its `lanes` lanes. The whole warp.
  __device__ float dot(const LaneElements& other, int lanes) const {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum = fmaf(x[piece][k], other.x[piece][k], sum);
    }
#pragma unroll 1
    for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(kAll, sum, distance);
    return sum;
  }
};

// T: of the partials and their gradients. Gradient: of d_o.
template <class T, class Gradient, int kCount>
__global__ void __launch_bounds__(kThreads, 3) merge_backward_kernel(const __grid_constant__ Params p) {
  constexpr int kPieces = kMaxHeadSize / (kWarp * kCount);
  using Lane = LaneElements<kCount, kPieces>;
  const Part* const parts = p.parts != nullptr ? p.parts : p.held.part;
  const Part* const gradients = parts + p.count;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, slot = lane % p.lanes, first = lane - slot;
  const int rows_of_warp = kWarp / p.lanes, column = slot * kCount, columns = p.lanes * kCount;
  const std::int64_t warp = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
#pragma unroll 1
  for (std::int64_t begin = warp * rows_of_warp; begin < p.rows;
       begin += std::int64_t{gridDim.x} * kWarps * rows_of_warp) {
    const std::int64_t row = begin + lane / p.lanes;
    const bool there = row < p.rows;
    const Place at(p, min(row, p.rows - 1));
    double mine;  // the slot's exponential
    const Denominator denominator = denominator_of(p, parts, at, first, slot, mine);
    Lane d_o;
    if (!denominator.empty()) d_o.template load<Gradient>(p.outer.o, at, column, columns, p.Dv);

    // d_o . o_p of the slot's partial among those from `from` on.
    const auto dot_of_slot = [&](int from) {
      float dot = 0.0f;
#pragma unroll 1
      for (int n = 0; n < min(p.lanes, p.count - from); ++n) {
        Lane o;
        if (!(__shfl_sync(kAll, mine, first + n) < 0.0)) {
          o.template load<T>(parts[from + n].o, at, column, columns, p.Dv);
        }
        const float found = d_o.dot(o, p.lanes);
        if (slot == n) dot = found;
      }
      return dot;
    };
    float dot = 0.0f;
    double delta = 0.0;  // d_o . o
    if (p.dots) {
#pragma unroll 1
      for (int from = 0; from < p.count; from += p.lanes) {
        if (p.count > p.lanes) mine = exponential(p, parts, at, from + slot, denominator.largest);
        dot = dot_of_slot(from);
        const double share = mine < 0.0 ? 0.0 : mine / denominator.total * dot;
#pragma unroll 1
        for (int n = 0; n < min(p.lanes, p.count - from); ++n) delta += __shfl_sync(kAll, share, first + n);
      }
    }
    const double d_lse = p.outer.lse.data != nullptr ? *at.in(p.outer.lse) : 0.0f;
#pragma unroll 1
    for (int from = 0; from < p.count; from += p.lanes) {
      if (p.count > p.lanes) {
        mine = exponential(p, parts, at, from + slot, denominator.largest);
        if (p.dots) dot = dot_of_slot(from);
      }
      const double weight = mine < 0.0 ? -1.0 : mine / denominator.total;
      if (there && from + slot < p.count) {
        const PerRow& to = gradients[from + slot].lse;
        if (to.data != nullptr) {
          *at.in(to) = weight < 0.0 ? 0.0f : static_cast<float>(weight * (dot - delta + d_lse));
        }
      }
#pragma unroll 1
      for (int n = 0; n < min(p.lanes, p.count - from); ++n) {
        const float factor = __shfl_sync(kAll, static_cast<float>(weight), first + n);
        const Rows& to = gradients[from + n].o;
        if (!there || to.data == nullptr) continue;
        d_o.template store_times<T>(factor, !(factor < 0.0f), to, at, column, columns, p.Dv);
      }
    }
    if (p.sink_terms != nullptr && there && slot == 0) {
      p.sink_terms[at.h * (p.rows / p.H) + at.b * p.S + at.i] =
          denominator.empty() ? 0.0 : denominator.sink / denominator.total * (d_lse - delta);
    }
  }
}

// dsink of a head from `lines` terms: a block a head, each thread's terms and the threads' sums in a fixed order.
__global__ void __launch_bounds__(kThreads)
    sink_gradient_kernel(const double* terms, std::int64_t lines, PerRow dsink) {
  __shared__ double sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const double* const mine = terms + blockIdx.x * lines;
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t n = thread; n < lines; n += kThreads) sum += mine[n];
  sums[thread] = sum;
#pragma unroll 1
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) dsink.data[blockIdx.x * dsink.stride_h] = static_cast<float>(sums[0]);
}

}  // namespace heddle::cuda::any::attention_merge

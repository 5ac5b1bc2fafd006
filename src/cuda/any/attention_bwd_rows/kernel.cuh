// The statistics of each query row that a backward pass needs: a pass over O and dO, bound by memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/any/attention_bwd_rows/params.h"

namespace heddle::cuda::any::attention_bwd_rows {

constexpr int kThreads = 256, kLanes = 8;      // kLanes read one row: 128 bytes at a time
constexpr int kBlockRows = kThreads / kLanes;  // divides kRowTile
constexpr int kSinkThreads = 1024;
constexpr float kLog2e = 1.44269504088896341f;

__device__ inline float* floats(const Plane& x) { return reinterpret_cast<float*>(x.data); }

// Sum of dO * O over this lane's share of a row. any: whether an element of O there is not 0.
template <class T>
__device__ inline float share_of_delta(const AttentionBackwardProblem& p, bool in_pieces, const std::byte* o_row,
                                       const std::byte* d_o_row, int lane, bool& any) {
  const T *o = reinterpret_cast<const T*>(o_row), *d_o = reinterpret_cast<const T*>(d_o_row);
  const int size = static_cast<int>(p.Dv);
  float sum = 0.0f;
  any = false;
  const auto add = [&](T x, T y) {
    const auto value = static_cast<float>(x);
    any |= value != 0.0f;
    sum = fmaf(value, static_cast<float>(y), sum);
  };
  if (in_pieces) {
    constexpr int kPiece = 16 / sizeof(T);
    struct alignas(16) Piece {
      T element[kPiece];
    };
#pragma unroll 4
    for (int d = lane * kPiece; d < size; d += kLanes * kPiece) {
      const Piece x = *reinterpret_cast<const Piece*>(o + d), y = *reinterpret_cast<const Piece*>(d_o + d);
#pragma unroll
      for (int n = 0; n < kPiece; ++n) add(x.element[n], y.element[n]);
    }
  } else {
#pragma unroll 4
    for (int d = lane; d < size; d += kLanes) add(o[d * p.o.stride_d], d_o[d * p.d_o.stride_d]);
  }
  return sum;
}

// Sums over the lanes of a row, in one order for all of them.
__device__ inline float sum_of_row(float x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

// Whether all of a row's denominator came from the sink. lse was then computed from the sink, and rounded.
__device__ inline bool is_sink(float lse, float sink) { return fabsf(lse - sink) <= 0x1p-22f * fabsf(sink); }

template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Params params) {
  const AttentionBackwardProblem& p = params.problem;
  const std::int64_t unit = blockIdx.x / params.blocks_per_sequence, b = unit / p.H, h = unit - b * p.H;
  const Sequence s = p.sequence(b);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t i =
      (blockIdx.x - unit * params.blocks_per_sequence) * kBlockRows + static_cast<int>(threadIdx.x) / kLanes;
  if (i >= round_up_to_tile(s.q_rows)) return;  // for a block as a whole

  float lse = -INFINITY, delta = 0.0f;
  bool any = false;
  const std::int64_t row = s.q_begin + i;
  if (i < s.sq) lse = floats(p.lse)[p.lse.offset(b, h, row)];
  if (lse != -INFINITY) {
    delta = share_of_delta<T>(p, params.in_pieces, p.o.at(b, row, h), p.d_o.at(b, row, h), lane, any);
  }
  delta = sum_of_row(delta);
  const unsigned with_output = __ballot_sync(0xffffffff, any) >> (threadIdx.x % 32 / kLanes * kLanes) & 0xff;

  const std::int64_t at = h * rows_per_head(p) + first_row(p, b, s) + i;
  if (lane == 0) {
    // A finite lse must not become the mark of a row without keys, nor may an infinite one.
    float lse_log2 = lse * kLog2e;
    if (lse_log2 == INFINITY) lse_log2 = NAN;
    const bool only_sink =
        p.sink.data != nullptr && with_output == 0 && is_sink(lse, floats(p.sink)[h * p.sink.stride_h]);
    if (lse == -INFINITY || only_sink) {
      lse_log2 = INFINITY;
      delta = 0.0f;
    } else if (p.d_lse.data != nullptr) {
      delta -= floats(p.d_lse)[p.d_lse.offset(b, h, row)];
    }
    params.rows.lse_log2[at] = lse_log2;
    params.rows.delta[at] = delta;
  }
  if (params.rows.sums != nullptr) {
    uint4* const words = params.rows.sums + at * params.rows.words_per_row;
    for (std::int64_t n = lane; n < params.rows.words_per_row; n += kLanes) words[n] = uint4{0, 0, 0, 0};
  }
}

// dsink[h] = -sum over rows of exp(sink - lse) * delta. One block a head, each thread's rows and the threads' sums in a
// fixed order.
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(const __grid_constant__ Params params) {
  __shared__ float sums[kSinkThreads];
  const AttentionBackwardProblem& p = params.problem;
  const std::int64_t h = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const float sink = floats(p.sink)[h * p.sink.stride_h];
  float sum = 0.0f;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    const std::int64_t from = h * rows_per_head(p) + first_row(p, b, s);
#pragma unroll 4
    for (std::int64_t i = thread; i < s.sq; i += kSinkThreads) {
      const float lse_log2 = params.rows.lse_log2[from + i];
      if (lse_log2 != INFINITY) {
        sum = fmaf(exp2f(fmaf(sink, kLog2e, -lse_log2)), -params.rows.delta[from + i], sum);
      } else if (sink != -INFINITY && p.d_lse.data != nullptr) {
        sum += floats(p.d_lse)[p.d_lse.offset(b, h, s.q_begin + i)];  // lse = sink
      }
    }
  }
  sums[thread] = sum;
#pragma unroll 1
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) floats(p.dsink)[h * p.dsink.stride_h] = sums[0];
}

}  // namespace heddle::cuda::any::attention_bwd_rows

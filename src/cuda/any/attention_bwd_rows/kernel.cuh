// The statistics of each query row that a backward pass needs: a pass over O and dO, bound by memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/any/attention_bwd_rows/large_rows.cuh"
#include "cuda/any/attention_bwd_rows/params.h"
#include "cuda/any/bounded_piece.h"
#include "cuda/any/options.cuh"
#include "cuda/common/attention/log2.h"
#include "cuda/common/overlap.cuh"

namespace heddle::cuda::any::attention_bwd_rows {

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 4;  // of a group of lanes: enough loads on their way for rows of 128 bytes too
constexpr int kSinkThreads = 1024;

// Rows of a block whose groups have so many lanes: divides kRowTile.
constexpr int block_rows(int lanes) { return kThreads / lanes * kRowsAtOnce; }

__device__ inline float* floats(const Plane& x) { return reinterpret_cast<float*>(x.data); }

// This lane's share of a group's rows: sums of dO * O, and whether an element of O is not 0.
struct Shares {
  float sum[kRowsAtOnce] = {};
  bool any[kRowsAtOnce] = {};
};

// Neighbouring elements of a row.
template <class T, int kPiece>
struct alignas(kPiece * sizeof(T)) Piece {
  T element[kPiece];
};

// What dO is rounded to: the group's first row, and how many of its rows exist.
template <class T>
struct RoundedRows {
  T* first;
  std::int64_t stride;
  int rows;

  template <class Wide, int kPiece>
  __device__ void store(int row, int d, const Piece<Wide, kPiece>& x) const {
    if (row >= rows) return;
    Piece<T, kPiece> y;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) y.element[n] = static_cast<T>(x.element[n]);
    *reinterpret_cast<Piece<T, kPiece>*>(first + row * stride + d) = y;
  }
};

// o, d_o: the group's first row. reads: bit j says whether row j is read. All loads of a piece are on their way before
// the first is used.
template <class T, int kPiece, class Rounded>
__device__ inline void add_pieces(const AttentionBackwardProblem& p, const T* o, const T* d_o, unsigned reads, int lane,
                                  int lanes, const RoundedRows<Rounded>& rounded, Shares& shares) {
  const int size = static_cast<int>(p.Dv);
#pragma unroll 1
  for (int d = lane * kPiece; d < size; d += lanes * kPiece) {
    Piece<T, kPiece> x[kRowsAtOnce], y[kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      x[j] = y[j] = {};
      if ((reads >> j & 1) == 0) continue;
      x[j] = *reinterpret_cast<const Piece<T, kPiece>*>(o + j * p.o.stride_s + d * p.o.stride_d);
      y[j] = *reinterpret_cast<const Piece<T, kPiece>*>(d_o + j * p.d_o.stride_s + d * p.d_o.stride_d);
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        const auto value = static_cast<float>(x[j].element[n]);
        shares.any[j] |= value != 0.0f;
        shares.sum[j] = fmaf(value, static_cast<float>(y[j].element[n]), shares.sum[j]);
      }
      if constexpr (!std::is_same_v<T, Rounded>) rounded.store(j, d, y[j]);
    }
  }
}

// Whether all of a row's denominator came from the sink. lse was then computed from the sink, and rounded.
__device__ inline bool is_sink(float lse, float sink) { return fabsf(lse - sink) <= 0x1p-22f * fabsf(sink); }

// The largest logit of a row, and the sum of exp(logit - largest), the sink's included.
struct Denominator {
  float largest = -INFINITY, sum = 0.0f;

  __device__ void add(float largest_of_others, float sum_of_others) {
    const float top = fmaxf(largest, largest_of_others);
    if (top == -INFINITY) return;
    sum = sum * expf(largest - top) + sum_of_others * expf(largest_of_others - top);
    largest = top;
  }
};

// Of row i, as the definition reads. The whole warp.
template <class T>
__device__ Denominator denominator_of(const AttentionBackwardProblem& p, const Sequence& s, std::int64_t b,
                                      std::int64_t h, std::int64_t i) {
  const auto [begin, end] = p.key_range(s, i);
  const std::byte* const q = p.q.at(b, s.q_begin + i, h);
  Denominator mine;
#pragma unroll 1
  for (std::int64_t j = begin + threadIdx.x % 32; j < end; j += 32) {
    const std::byte* const k = p.key_row(p.k, b, s, j, h / p.G);
    float product = 0.0f;
#pragma unroll 1
    for (std::int64_t d = 0; d < p.D; ++d) product = fmaf(element<T>(p.q, q, d), element<T>(p.k, k, d), product);
    mine.add(logit<T>(p, s, b, h, i, j, product), 1.0f);
  }
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const float largest = __shfl_xor_sync(0xffffffff, mine.largest, distance);
    mine.add(largest, __shfl_xor_sync(0xffffffff, mine.sum, distance));
  }
  mine.add(sink_of(p, h), 1.0f);
  return mine;
}

// A group of lanes has four rows, a block block_rows() neighbouring rows of a head; the heads' blocks of the same rows
// follow each other, as their rows do in memory. T: of o and d_o; Rounded: another, if d_o is to be rounded to it.
template <class T, class Rounded = T>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Params params) {
  let_next_grid_start();
  const AttentionBackwardProblem& p = params.problem;
  const unsigned heads = static_cast<unsigned>(p.H), blocks = params.blocks_per_sequence;
  const unsigned unit = blockIdx.x / heads, h = blockIdx.x - unit * heads, b = unit / blocks;
  const Sequence s = p.stored_sequence(b);
  const int lanes = params.lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t block_row = std::int64_t{unit - b * blocks} * block_rows(lanes);
  if (block_row >= round_up_to_tile(s.q_rows)) return;
  const std::int64_t block_at = h * rows_per_head(p) + first_row(p, b, s) + block_row;
  const int group_row = static_cast<int>(threadIdx.x) / lanes * kRowsAtOnce;  // in the block
  const std::int64_t i = block_row + group_row, row = s.q_begin + i;

  // Lane j of a group has row j's statistics.
  float lse = -INFINITY;
  if (lane < kRowsAtOnce && i + lane < s.sq) lse = floats(p.lse)[p.lse.offset(b, h, row + lane)];
  if (params.rows.sums != nullptr) {
    uint4* const words = params.rows.sums + block_at * params.rows.words_per_row;
    const int count = block_rows(lanes) * static_cast<int>(params.rows.words_per_row);
#pragma unroll 4
    for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) words[n] = uint4{0, 0, 0, 0};
  }
  const unsigned first_lane = threadIdx.x % 32 / lanes * lanes;
  const unsigned reads = __ballot_sync(0xffffffff, lse != -INFINITY) >> first_lane;
  Shares shares;
  const T *o = reinterpret_cast<const T*>(p.o.at(b, row, h)), *d_o = reinterpret_cast<const T*>(p.d_o.at(b, row, h));
  RoundedRows<Rounded> rounded{};
  if constexpr (!std::is_same_v<T, Rounded>) {
    const Operand& to = params.rows.d_o;
    rounded = {reinterpret_cast<Rounded*>(to.at(b, row, h)), to.stride_s,
               static_cast<int>(clamped(s.sq - i, 0, kRowsAtOnce))};
  }
  if (params.in_pieces) {
    add_pieces<T, 16 / sizeof(T)>(p, o, d_o, reads, lane, lanes, rounded, shares);
  } else {
    add_pieces<T, 1>(p, o, d_o, reads, lane, lanes, rounded, shares);
  }
#pragma unroll 1
  for (int distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) shares.sum[j] += __shfl_xor_sync(0xffffffff, shares.sum[j], distance);
  }
  float delta = 0.0f;
  bool with_output = false;
#pragma unroll
  for (int j = 0; j < kRowsAtOnce; ++j) {
    const unsigned any = __ballot_sync(0xffffffff, shares.any[j]) >> first_lane;
    if (lane == j) {
      delta = shares.sum[j];
      with_output = lanes < 32 ? any << (32 - lanes) != 0 : any != 0;
    }
  }
  if (lane >= kRowsAtOnce) return;

  // A finite lse must not become the mark of a row without keys, nor may an infinite one.
  float lse_log2 = lse * kLog2e;
  if (lse_log2 == INFINITY) lse_log2 = NAN;
  const bool only_sink = p.sink.data != nullptr && !with_output && is_sink(lse, floats(p.sink)[h * p.sink.stride_h]);
  if (lse == -INFINITY || only_sink) {
    lse_log2 = INFINITY;
    delta = 0.0f;
  } else if (p.d_lse.data != nullptr) {
    delta -= floats(p.d_lse)[p.d_lse.offset(b, h, row + lane)];
  }
  params.rows.lse_log2[block_at + group_row + lane] = lse_log2;
  params.rows.delta[block_at + group_row + lane] = delta;
}

// What rows_kernel could not say of rows with a large lse, those of a piece of a longer problem among them. A thread
// has a row, but its warp finds the denominators of those that there are, one after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) large_rows_kernel(const __grid_constant__ Params params) {
  let_next_grid_start();
  const AttentionBackwardProblem& p = params.problem;
  const unsigned heads = static_cast<unsigned>(p.H), blocks = params.blocks_per_sequence;
  const unsigned unit = blockIdx.x / heads, h = blockIdx.x - unit * heads, b = unit / blocks;
  const Sequence s = bounded_piece(p, b);
  const std::int64_t i = std::int64_t{unit - b * blocks} * kThreads + threadIdx.x;
  const std::int64_t at = h * rows_per_head(p) + first_row(p, b, s) + i;
  bool mine = false;
  if (i < s.sq) {
    const float lse = floats(p.lse)[p.lse.offset(b, h, s.q_begin + i)];
    mine = fabsf(lse) >= kLargeLse && fabsf(lse) < INFINITY && params.rows.lse_log2[at] != INFINITY;
    if (mine && p.merged) {  // the other keys of the row are not here: P = exp(s - lse), the difference first
      params.rows.largest[at] = lse;
      params.rows.lse_log2[at] = mark_of_large_row(0.0f);
      mine = false;
    }
  }
#pragma unroll 1
  for (unsigned left = __ballot_sync(0xffffffff, mine); left != 0; left &= left - 1) {
    const int owner = __ffs(left) - 1;
    const Denominator d = denominator_of<T>(p, s, b, h, __shfl_sync(0xffffffff, i, owner));
    if (static_cast<int>(threadIdx.x) % 32 != owner || !(d.sum >= 1.0f)) continue;  // NaN stays what it was
    params.rows.largest[at] = d.largest;
    params.rows.lse_log2[at] = mark_of_large_row(log2f(d.sum));
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
    const Sequence s = p.stored_sequence(b);
    const std::int64_t from = h * rows_per_head(p) + first_row(p, b, s);
#pragma unroll 4
    for (std::int64_t i = thread; i < s.sq; i += kSinkThreads) {
      const float lse_log2 = params.rows.lse_log2[from + i];
      if (lse_log2 != INFINITY) {
        const float exponent = is_large_row(lse_log2)
                                   ? (sink - params.rows.largest[from + i]) * kLog2e - log2_sum_of_large_row(lse_log2)
                                   : fmaf(sink, kLog2e, -lse_log2);
        sum = fmaf(exp2f(exponent), -params.rows.delta[from + i], sum);
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

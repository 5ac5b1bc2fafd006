// The encoder's and the Transformer block's steps between products. A warp or a block normalises a row, which it reads
// two or three times, from the cache after the first; a block pools a sequence.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/any/linear/row_norm.cuh"
#include "cuda/model.h"

namespace heddle::cuda::any::model {

using linear::kPiece;
using linear::load_piece;

constexpr int kWarps = 8, kThreads = 32 * kWarps;

__device__ inline float over_warp(float x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

template <class T>
struct StoredRow {
  const T* x;
  __device__ void load(int piece, float (&to)[kPiece]) const { load_piece<T>(x, piece, to); }
};
template <class T>
struct StoredRows {
  const T* x;
  std::int64_t columns;
  __device__ StoredRow<T> row(std::int64_t i) const { return {x + i * columns}; }
};

template <class T>
struct EmbeddedRow {
  const T *word, *position, *token_type;
  __device__ void load(int piece, float (&to)[kPiece]) const {
    float other[kPiece];
    load_piece<T>(word, piece, to);
    load_piece<T>(position, piece, other);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) to[j] += other[j];
    load_piece<T>(token_type, piece, other);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) to[j] += other[j];
  }
};
template <class T>
struct EmbeddedRows {
  EmbeddingRows from;
  std::int64_t columns;
  __device__ EmbeddedRow<T> row(std::int64_t i) const {
    // The last sequence that begins at or before row i: offsets[first] <= i < offsets[end].
    std::int64_t first = 0, end = from.sequences;
    while (end - first > 1) {
      const std::int64_t middle = (first + end) / 2;
      (from.offsets[middle] <= i ? first : end) = middle;
    }
    return {static_cast<const T*>(from.word) + from.ids[i] * columns,
            static_cast<const T*>(from.position) + (i - from.offsets[first]) * columns,
            static_cast<const T*>(from.token_type)};
  }
};

// grid: rows / rows of a block, rounded up. kThreadsOfRow: 32, or all of a block. y may be what `rows` reads: a thread
// writes what it alone has read.
template <class T, int kThreadsOfRow, class Rows>
__global__ void __launch_bounds__(kThreads) norm_kernel(const Rows rows, const NormRows p) {
  static_assert(kThreadsOfRow == 32 || kThreadsOfRow == kThreads);
  constexpr int kRows = kThreads / kThreadsOfRow;
  const std::int64_t i = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kThreadsOfRow;
  if (i >= p.rows) return;
  const auto row = rows.row(i);
  const int pieces = static_cast<int>(p.columns / kPiece);
  const auto for_each_piece = [&](auto visit) {
    for (int piece = static_cast<int>(threadIdx.x % kThreadsOfRow); piece < pieces; piece += kThreadsOfRow) {
      float x[kPiece];
      row.load(piece, x);
      visit(piece, x);
    }
  };
  const auto mean_of_row = [&](float sum) {
    if constexpr (kThreadsOfRow == 32) {
      sum = over_warp(sum);
    } else {
      sum = linear::over_block<kThreads>(sum, linear::Sum{});
    }
    return sum / static_cast<float>(p.columns);
  };
  float mean = 0.0f, squares = 0.0f;
  if (p.kind == Norm::layer_norm) {
    float sum = 0.0f;
    for_each_piece([&](int, const float(&x)[kPiece]) {
#pragma unroll
      for (const float one : x) sum += one;
    });
    mean = mean_of_row(sum);
  }
  for_each_piece([&](int, const float(&x)[kPiece]) {
#pragma unroll
    for (const float one : x) squares += (one - mean) * (one - mean);
  });
  const float inverse = 1.0f / sqrtf(mean_of_row(squares) + p.epsilon);
  uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(p.y) + i * p.y_stride);
  for_each_piece([&](int piece, float(&x)[kPiece]) {
    const float4* const weight = reinterpret_cast<const float4*>(p.weight) + 2 * piece;
    const float4* const bias = reinterpret_cast<const float4*>(p.bias) + 2 * piece;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 w = weight[half], b = p.bias != nullptr ? bias[half] : make_float4(0, 0, 0, 0);
      float* const four = x + 4 * half;
      four[0] = (four[0] - mean) * inverse * w.x + b.x;
      four[1] = (four[1] - mean) * inverse * w.y + b.y;
      four[2] = (four[2] - mean) * inverse * w.z + b.z;
      four[3] = (four[3] - mean) * inverse * w.w + b.w;
    }
    to[piece] = linear::packed_piece<T>(x);
  });
}

// grid: sequences. Warps take rows in turn, a lane 8 columns of 256 at a time; a thread then has one column of those.
template <class T>
__global__ void __launch_bounds__(kThreads) pool_kernel(const PooledRows p) {
  static_assert(kThreads == 32 * kPiece);
  __shared__ float sums[kWarps][kThreads];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t begin = p.offsets[blockIdx.x], end = p.offsets[blockIdx.x + 1];
  float* const mean = p.y + blockIdx.x * p.columns;
  const float count = static_cast<float>(max(end - begin, std::int64_t{1}));
  float squares = 0.0f;
  for (std::int64_t first = 0; first < p.columns; first += kThreads) {
    float sum[kPiece] = {};
    const int piece = static_cast<int>(first / kPiece) + lane;
    if (piece < p.columns / kPiece) {
      for (std::int64_t i = begin + warp; i < end; i += kWarps) {
        float x[kPiece];
        load_piece<T>(static_cast<const T*>(p.x) + i * p.columns, piece, x);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) sum[j] += x[j];
      }
    }
    __syncthreads();  // the last round's sums were read
#pragma unroll
    for (int j = 0; j < kPiece; ++j) sums[warp][lane * kPiece + j] = sum[j];
    __syncthreads();
    const std::int64_t column = first + threadIdx.x;
    if (column >= p.columns) continue;
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += sums[w][threadIdx.x];
    all /= count;
    mean[column] = all;
    squares += all * all;
  }
  if (!p.normalize) return;
  const float length = fmaxf(sqrtf(linear::over_block<kThreads>(squares, linear::Sum{})), 1e-12f);
  for (std::int64_t column = threadIdx.x; column < p.columns; column += kThreads) mean[column] /= length;
}

// grid: pieces / kThreads, rounded up.
template <class T>
__global__ void __launch_bounds__(kThreads) widen_kernel(const void* x, std::int64_t pieces, float* y) {
  const std::int64_t piece = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  float eight[kPiece];
  load_piece<T>(static_cast<const T*>(x) + piece * kPiece, 0, eight);
  float4* const to = reinterpret_cast<float4*>(y) + 2 * piece;
  to[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
  to[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
}

}  // namespace heddle::cuda::any::model

// Sums of gated branches, and their gradients: each element is read once and written once. A group of lanes has a row
// of a head. A thread has so little to load that what finds it counts: nothing is divided, and there is no branch among
// loads.
#pragma once

#include "cuda/any/gate_branches/params.h"
#include "cuda/common/elements.cuh"

namespace heddle::cuda::any::gate_branches {

constexpr unsigned kAll = 0xffffffff;

struct Place {
  std::int64_t b, i, h;

  __device__ Place(const Params& p, std::int64_t row) {
    if (p.rows <= INT32_MAX) {
      const auto at = static_cast<unsigned>(row), line = p.of_H.quotient(at), sequence = p.of_S.quotient(line);
      h = at - line * static_cast<unsigned>(p.H);
      b = sequence;
      i = line - sequence * static_cast<unsigned>(p.S);
    } else {
      const std::int64_t line = row / p.H;
      h = row - line * p.H;
      b = line / p.S;
      i = line - b * p.S;
    }
  }
  __device__ float* in(const PerRow& x) const { return x.data + (b * x.stride_b + h * x.stride_h + i * x.stride_i); }
};

// A piece of a row: 16 bytes, in rows that are contiguous and aligned so, or one element.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Piece {
  T element[kCount];
};

template <class T, int kCount>
__device__ Piece<T, kCount>* piece_at(const Rows& x, const Place& at, int d) {
  const std::int64_t row = at.b * x.stride_b + at.i * x.stride_i + at.h * x.stride_h;
  return reinterpret_cast<Piece<T, kCount>*>(reinterpret_cast<T*>(x.data) + row + (kCount > 1 ? d : d * x.stride_d));
}

// A lane's pieces of a row.
template <class T, int kCount>
struct Lane {
  static constexpr int kPieces = kMaxHeadSize / (kWarp * kCount);
  Piece<T, kCount> piece[kPieces];

  __device__ void load(const Rows& from, const Place& at, int column, int columns, int size) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int d = column + k * columns;
      if (d < size) piece[k] = *piece_at<T, kCount>(from, at, d);
    }
  }
};

// Where a thread begins: its first row, how many rows all threads have, and its column of a row's pieces.
template <int kCount>
struct Start {
  std::int64_t row, step;
  int slot, column, columns;  // slot: of the lanes that share a row

  __device__ explicit Start(const Params& p) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, rows_log2 = 5 - p.lanes_log2;
    slot = lane & ((1 << p.lanes_log2) - 1);
    column = slot * kCount;
    columns = kCount << p.lanes_log2;
    const std::int64_t warp = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    row = (warp << rows_log2) + (lane >> p.lanes_log2);
    step = std::int64_t{gridDim.x} * kWarps << rows_log2;
  }
};

template <class T, int kCount, int kBranches>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ Params p) {
  using L = Lane<T, kCount>;
  const Start<kCount> start(p);
#pragma unroll 1
  for (std::int64_t row = start.row; row < p.rows; row += start.step) {
    const Place at(p, row);
    float gate[kBranches];
    L o[kBranches];
#pragma unroll
    for (int n = 0; n < kBranches; ++n) {
      gate[n] = *at.in(p.branch[n].gate);
      o[n].load(p.branch[n].o, at, start.column, start.columns, p.Dv);
    }
#pragma unroll
    for (int k = 0; k < L::kPieces; ++k) {
      const int d = start.column + k * start.columns;
      if (d >= p.Dv) continue;
      float sum[kCount] = {};
#pragma unroll
      for (int n = 0; n < kBranches; ++n) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) sum[e] = fmaf(gate[n], static_cast<float>(o[n].piece[k].element[e]), sum[e]);
      }
      Piece<T, kCount> out;
#pragma unroll
      for (int e = 0; e < kCount; ++e) out.element[e] = static_cast<T>(sum[e]);
      *piece_at<T, kCount>(p.out, at, d) = out;
    }
  }
}

template <class T, int kCount, int kBranches>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(const __grid_constant__ Params p) {
  using L = Lane<T, kCount>;
  const Start<kCount> start(p);
  const int column = start.column, columns = start.columns;
  // Whole warps go round, as all lanes take part in sums.
#pragma unroll 1
  for (std::int64_t row = start.row; __any_sync(kAll, row < p.rows); row += start.step) {
    const bool there = row < p.rows;
    const Place at(p, there ? row : p.rows - 1);
    const int size = there ? p.Dv : 0;
    L d_out, o[kBranches];
    float gate[kBranches], dot[kBranches] = {};
    d_out.load(p.out, at, column, columns, size);
#pragma unroll
    for (int n = 0; n < kBranches; ++n) {
      gate[n] = *at.in(p.branch[n].gate);
      if (p.gradient[n].gate.data != nullptr) o[n].load(p.branch[n].o, at, column, columns, size);
    }
#pragma unroll
    for (int n = 0; n < kBranches; ++n) {
      const Branch& to = p.gradient[n];
#pragma unroll
      for (int k = 0; k < L::kPieces; ++k) {
        const int d = column + k * columns;
        if (d >= size) continue;
        if (to.o.data != nullptr) {
          Piece<T, kCount> d_o;
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            d_o.element[e] = static_cast<T>(gate[n] * static_cast<float>(d_out.piece[k].element[e]));
          }
          *piece_at<T, kCount>(to.o, at, d) = d_o;
        }
        if (to.gate.data != nullptr) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            dot[n] = fmaf(static_cast<float>(d_out.piece[k].element[e]), static_cast<float>(o[n].piece[k].element[e]),
                          dot[n]);
          }
        }
      }
    }
#pragma unroll 1
    for (int distance = 1; distance >> p.lanes_log2 == 0; distance *= 2) {
#pragma unroll
      for (int n = 0; n < kBranches; ++n) dot[n] += __shfl_xor_sync(kAll, dot[n], distance);
    }
#pragma unroll
    for (int n = 0; n < kBranches; ++n) {
      if (p.gradient[n].gate.data != nullptr && there && start.slot == 0) *at.in(p.gradient[n].gate) = dot[n];
    }
  }
}

}  // namespace heddle::cuda::any::gate_branches

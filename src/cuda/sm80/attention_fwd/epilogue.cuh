// The end of a tile: lse, and O normalised, rounded and written.
#pragma once

#include <cfloat>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/attention_fwd/consumer.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// Writes lse; returns by `inverse` what O must be multiplied with, 0 for rows without keys.
template <class C>
__device__ inline void finish_rows(const Params& p, const Work& w, const Consumer<C>& rows, int warp_row,
                                   float (&inverse)[C::kGroups][2]) {
  const AttentionProblem& a = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float keep = C::kScoreOptions ? 1.0f / (1.0f - a.dropout.p) : 1.0f;
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.first + warp_row + kGroupRows * g + 8 * r + lane / 4;
      float sum = sum_of_quad(rows.sum[g][r]), max = C::kScoreOptions ? rows.max[g][r] : rows.max[g][r] * kLn2;
      inverse[g][r] = sum == 0.0f ? 0.0f : __fdividef(keep, sum);
      // Scores of codes lack q times the mean of the keys (any/attention_int8_qk/layout.h), which lse must have.
      if constexpr (Int8Qk<C>) {
        if (i < w.sq) max += p.codes.q_shift.at(w.b, w.q_row + i, w.h) * kLn2;
      }
      if (a.sink.data != nullptr) {
        // The sink joins the sum. Both are taken relative to the larger logit, so that nothing overflows; without keys
        // that is the sink, which may be less than what max began with.
        const float sink = reinterpret_cast<const float*>(a.sink.data)[w.h * a.sink.stride_h];
        if (sum == 0.0f) max = fmaxf(sink, -FLT_MAX);
        const float top = fmaxf(max, sink), factor = exp_of_difference(max, top);
        inverse[g][r] = sum == 0.0f ? 0.0f : keep * factor;
        sum = sum * factor + exp_of_difference(sink, top);
        inverse[g][r] = sum == 0.0f ? 0.0f : __fdividef(inverse[g][r], sum);
        max = top;
      }
      if (i >= w.sq) sum = inverse[g][r] = 0.0f;
      if (a.lse.data != nullptr && i < w.q_rows && lane % 4 == 0) {
        reinterpret_cast<float*>(
            a.lse.data)[w.b * a.lse.stride_b + w.h * a.lse.stride_h + (w.q_row + i) * a.lse.stride_i] =
            sum == 0.0f ? -INFINITY : max + __logf(sum);
      }
    }
  }
}

// A warp's rows of an o in f32: four lanes have 32 bytes side by side.
template <class C>
__device__ void store_wide_rows(const Params& p, const Work& w, const Consumer<C>& rows, int warp_row,
                                const float (&inverse)[C::kGroups][2]) {
  const Operand& o = p.problem.o;
  const int lane = static_cast<int>(threadIdx.x) % 32, first = w.first + warp_row + lane / 4, begin = lane % 4 * 2;
  const int left = static_cast<int>(p.problem.Dv) - begin;
  float* const head = reinterpret_cast<float*>(o.data) + (w.b * o.stride_b + w.h * o.stride_h);
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first + kGroupRows * g + 8 * r;
      const float factor = inverse[g][r];
      if (i >= w.q_rows) continue;
      float* to = head + (std::int64_t{w.q_row + i} * o.stride_s + begin * o.stride_d);
#pragma unroll
      for (int n = 0; n < C::kHeadSize / 8; ++n, to += 8 * o.stride_d) {
        const float x = factor == 0.0f ? 0.0f : rows.o[g][n][2 * r] * factor;
        const float y = factor == 0.0f ? 0.0f : rows.o[g][n][2 * r + 1] * factor;
        if (p.o_aligned && 8 * n + 1 < left) {
          *reinterpret_cast<float2*>(to) = {x, y};
        } else {
          if (8 * n < left) to[0] = x;
          if (8 * n + 1 < left) to[o.stride_d] = y;
        }
      }
    }
  }
}

// A warp's rows of O through its rows of the q tile, so that they go out in pieces of 16 bytes where o allows.
template <class C>
requires(!Float32<C>) __device__ void store_rows(const Params& p, const Work& w, const Consumer<C>& rows, int warp_row,
                                                 const float (&inverse)[C::kGroups][2], SharedMemory<C>& shared) {
  if (!Int8Qk<C> && p.problem.o.dtype == DType::f32) return store_wide_rows<C>(p, w, rows, warp_row, inverse);
  using T = typename C::Element;
  constexpr std::uint32_t kPitch = C::kPitch;
  constexpr int kChunks = C::kHeadSize / 8, kRows = kGroupRows * C::kGroups;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  static_assert(C::kTileQ * kPitch <= sizeof(shared.q) + sizeof(shared.k) + sizeof(shared.v),
                "o must fit where q, k and v were");
  std::byte* const staging = reinterpret_cast<std::byte*>(&shared.q) + warp_row * kPitch;
  __syncwarp();
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = kGroupRows * g + 8 * r + lane / 4;
      const float factor = inverse[g][r];
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        // Selected, not multiplied: a row without keys is 0 beside any neighbour.
        const float x = factor == 0.0f ? 0.0f : rows.o[g][n][2 * r] * factor;
        const float y = factor == 0.0f ? 0.0f : rows.o[g][n][2 * r + 1] * factor;
        *reinterpret_cast<std::uint32_t*>(staging + swizzled(kPitch, row, n) + 4 * (lane % 4)) = ptx::pack2<T>(x, y);
      }
    }
  }
  __syncwarp();
  const Operand& o = p.problem.o;
  const int size = static_cast<int>(p.problem.Dv);
  // A lane has one column of pieces, every kStep-th row from `first` on. Several pieces are on their way at a time:
  // one by one, they took 7 % of a call with 512 keys.
  constexpr int kStep = 32 / kChunks, kPieces = kRows / kStep, kBatch = kPieces < 8 ? kPieces : 8;
  const int row = lane / kChunks, chunk = lane % kChunks, column = 8 * chunk, first = w.first + warp_row + row;
  if (column >= size) return;
  const std::int64_t step = kStep * o.stride_s;
  T* to = reinterpret_cast<T*>(o.data) + (w.b * o.stride_b + w.h * o.stride_h) +
          (std::int64_t{w.q_row + first} * o.stride_s + column * o.stride_d);
  if (p.o_aligned && column + 8 <= size) {
#pragma unroll 1
    for (int n = 0; n < kPieces; n += kBatch, to += kBatch * step) {
      uint4 piece[kBatch];
#pragma unroll
      for (int m = 0; m < kBatch; ++m) {
        piece[m] = *reinterpret_cast<const uint4*>(staging + swizzled(kPitch, row + (n + m) * kStep, chunk));
      }
#pragma unroll
      for (int m = 0; m < kBatch; ++m) {
        if (first + (n + m) * kStep < w.q_rows) *reinterpret_cast<uint4*>(to + m * step) = piece[m];
      }
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < kPieces && first + n * kStep < w.q_rows; ++n, to += step) {
    const T* from = reinterpret_cast<const T*>(staging + swizzled(kPitch, row + n * kStep, chunk));
    for (int d = 0; d < 8 && column + d < size; ++d) to[d * o.stride_d] = from[d];
  }
}

// A warp's rows of O. With the columns as multiply_pv() leaves them, a lane has four side by side.
template <class C>
requires Float32<C> __device__ void store_rows(const Params& p, const Work& w, const Consumer<C>& rows, int warp_row,
                                               const float (&inverse)[C::kGroups][2], SharedMemory<C>&) {
  const Operand& o = p.problem.o;
  const int size = static_cast<int>(p.problem.Dv), lane = static_cast<int>(threadIdx.x) % 32;
  float* const head = reinterpret_cast<float*>(o.data) + (w.b * o.stride_b + w.h * o.stride_h);
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.first + warp_row + kGroupRows * g + 8 * r + lane / 4;
      const float factor = inverse[g][r];
      if (i >= w.q_rows) continue;
      float* const row = head + std::int64_t{w.q_row + i} * o.stride_s;
#pragma unroll
      for (int n = 0; n < C::kHeadSize / 16; ++n) {
        const int column = n / 2 * 32 + lane % 4 * 8 + n % 2 * 4;
        float x[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) x[m] = factor == 0.0f ? 0.0f : rows.o[g][n / 2 * 4 + m][2 * r + n % 2] * factor;
        if (p.o_aligned && column + 4 <= size) {
          *reinterpret_cast<float4*>(row + column) = {x[0], x[1], x[2], x[3]};
        } else {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            if (column + m < size) row[(column + m) * o.stride_d] = x[m];
          }
        }
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_fwd

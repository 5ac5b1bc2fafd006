// What becomes of sums in registers: dQ is added up in global memory, dK and dV are rounded and written.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/shared_sums.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// This warp's share of a query tile's sums of dQ: fragments of 128 floats, so that additions are whole lines.
template <class C>
__device__ inline float* dq_sums_of(const Params& p, std::int64_t stored_row, int h, int tile) {
  const std::int64_t row = h * p.rows_per_head + stored_row + std::int64_t{tile} * C::kTileQ;
  const unsigned warp = threadIdx.x / 32;
  constexpr int kOfWarp = C::Rows::kGroups * C::Rows::kBlocks * 128;
  return p.dq_sums + (row * C::kHeadSize + warp * kOfWarp);
}

// Calls visit(fragment, sums of it) for the blocks of a warp's share from `first` on.
template <class C, int kBlocks, class Visit>
__device__ inline void for_each_fragment(float* share, int first, float (&sums)[C::Rows::kGroups][kBlocks][4],
                                         Visit visit) {
#pragma unroll
  for (int g = 0; g < C::Rows::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) visit(share + (g * C::Rows::kBlocks + first + n) * 128, sums[g][n]);
  }
}

// Two sums of block n, less `first_column`, to a row of an output with `size` columns. pairs: neighbours may be written
// at once.
template <class C>
__device__ inline void store_two(typename C::Element* row, std::int64_t stride, bool pairs, int first_column, int n,
                                 int lane, int size, float x, float y) {
  using T = typename C::Element;
  const int c0 = first_column + column_of<C>(n, 0, lane), c1 = first_column + column_of<C>(n, 1, lane);
  if constexpr (!Float32<C>) {
    if (pairs && c1 < size) {
      *reinterpret_cast<std::uint32_t*>(row + c0) = ptx::pack2<T>(x, y);
      return;
    }
  }
  if (c0 < size) row[c0 * stride] = static_cast<T>(x);
  if (c1 < size) row[c1 * stride] = static_cast<T>(y);
}

// A warp's share of sums, times `scale`, to the rows below `rows` of an output's head. row0: its row 0.
template <class C, class ShareOfWarp>
__device__ inline void store_sums(const Params& p, const typename ShareOfWarp::Sums& sums, float scale,
                                  const Operand& x, std::byte* row0, int rows, std::int64_t size) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned warp = threadIdx.x / 32;
#pragma unroll
  for (int g = 0; g < ShareOfWarp::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(ShareOfWarp::first_row(warp)) + kGroupRows * g + 8 * r + lane / 4;
      if (row >= rows) continue;
      auto* const to = reinterpret_cast<typename C::Element*>(row0) + row * x.stride_s;
#pragma unroll
      for (int n = 0; n < ShareOfWarp::kBlocks; ++n) {
        store_two<C>(to, x.stride_d, p.pairs, static_cast<int>(ShareOfWarp::first_column(warp)), n, lane,
                     static_cast<int>(size), sums[g][n][2 * r] * scale, sums[g][n][2 * r + 1] * scale);
      }
    }
  }
}

// dK or dV of the CTA's keys.
template <class C>
__device__ inline void store_keys(const Params& p, const Work& w, const typename C::Keys::Sums& sums, float scale,
                                  const Operand& x, std::int64_t size) {
  if (x.data == nullptr) return;
  store_sums<C, typename C::Keys>(p, sums, scale, x, x.at(w.scores.b, w.scores.k_slot + w.first_key, w.kv_head),
                                  w.k_rows - w.first_key, size);
}

}  // namespace heddle::cuda::sm80::attention_bwd

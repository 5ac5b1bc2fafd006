// dbias: P and dS once more, one tile of the bias a CTA, which sums over what the bias is broadcast along, in a fixed
// order.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention_bwd/loader.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// The tile of the bias that a CTA has: of each of batch, heads, query tiles and key tiles, [begin, end) are what it
// sums over.
struct BiasTile {
  using Range = Interval<int>;
  Range b, h, q_tile, k_tile;

  __device__ explicit BiasTile(const Params& p) {
    unsigned rest = blockIdx.x;
    const auto take = [&](std::int64_t extent, int count, int of_bias) -> Range {
      if (extent == 1) return {0, count};
      const unsigned quotient = rest / of_bias;
      const int at = static_cast<int>(rest - quotient * of_bias);
      rest = quotient;
      return {at, at + 1};
    };
    const AttentionProblem& a = p.scores.problem;
    k_tile = take(p.bias_columns, p.k_tiles, p.k_tiles);
    q_tile = take(p.bias_rows, p.q_tiles, p.q_tiles);
    h = take(p.bias_heads, static_cast<int>(a.H), static_cast<int>(a.H));
    b = take(p.bias_batch, static_cast<int>(a.B), static_cast<int>(a.B));
  }
};

template <class C>
__device__ inline void add_tile(const Params& p, const Work& w, int tile, typename C::Scores::Sums& sums,
                                SharedMemory<C>& shared) {
  load_rows<C>(p, w, w.scores.h, tile, shared);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
  clear_idle_rows<C>(w.scores.sq - tile * C::kTileQ, shared);
  if (threadIdx.x / 32 < C::kScoreWarps) {
    typename C::Scores::Sums s, ds;
    compute_pairs<C, false>(p, w, tile, 0, s, ds, shared);
    for_each_pair<C>([&](int g, int n, int i) { sums[g][n][i] += ds[g][n][i]; });
  }
  __syncthreads();
}

// Sums of a tile, [kTileQ][kPitch], in shared memory.
template <class C>
struct BiasSums {
  static constexpr int kPitch = C::kTileK + 4;
  float row[C::kTileQ][kPitch];
};

template <class C>
__device__ inline void store_bias(const Params& p, const BiasTile& at, const BiasSums<C>& sums) {
  const int rows = p.bias_rows == 1 ? 1 : C::kTileQ, columns = p.bias_columns == 1 ? 1 : C::kTileK;
  const int over_rows = C::kTileQ / rows, over_columns = C::kTileK / columns;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < rows * columns; n += C::kThreads) {
    const int r = n / columns, c = n - r * columns;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < over_rows; ++i) {
#pragma unroll 1
      for (int j = 0; j < over_columns; ++j) sum += sums.row[r + i][c + j];
    }
    const std::int64_t i = p.bias_rows == 1 ? 0 : at.q_tile.begin * C::kTileQ + r;
    const std::int64_t j = p.bias_columns == 1 ? 0 : at.k_tile.begin * C::kTileK + c;
    if (i >= p.bias_rows || j >= p.bias_columns) continue;
    const std::int64_t to = p.dbias.offset(at.b.begin, at.h.begin, i, j);
    if (p.dbias.dtype == DType::f32) {
      reinterpret_cast<float*>(p.dbias.data)[to] = sum;
    } else {
      reinterpret_cast<typename C::Element*>(p.dbias.data)[to] = static_cast<typename C::Element>(sum);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) bias_gradient_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const auto& w = shared.work;
  const BiasTile at(p);
  typename C::Scores::Sums sums;
  for_each_pair<C>([&](int g, int n, int i) { sums[g][n][i] = 0.0f; });
#pragma unroll 1
  for (int b = at.b.begin; b < at.b.end; ++b) {
#pragma unroll 1
    for (int h = at.h.begin; h < at.h.end; ++h) {
#pragma unroll 1
      for (int k_tile = at.k_tile.begin; k_tile < at.k_tile.end; ++k_tile) {
        __syncthreads();
        if (threadIdx.x == 0) {
          shared.work = describe_sequence<C>(p, b, p.scores.group.quotient(h));
          shared.work.scores.h = h;
          choose_keys<C>(p, k_tile, {at.q_tile.begin * C::kTileQ, at.q_tile.end * C::kTileQ}, shared.work);
        }
        __syncthreads();
        const Interval<int> steps = w.steps;
        if (!steps.empty()) load_keys<C>(p, w, shared);
#pragma unroll 1
        for (int step = steps.begin; step < steps.end; ++step) {
          add_tile<C>(p, w, w.walk.index(step), sums, shared);
        }
      }
    }
  }

  static_assert(sizeof(BiasSums<C>) <= sizeof(SharedMemory<C>));
  auto& tile = *reinterpret_cast<BiasSums<C>*>(memory);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  if (warp < C::kScoreWarps)
    for_each_pair<C>([&](int g, int n, int i) {
      tile.row[C::Scores::first_row(warp) + kGroupRows * g + lane / 4 + i / 2 * 8]
              [C::Scores::first_column(warp) + 8 * n + 2 * (lane % 4) + i % 2] = sums[g][n][i];
    });
  __syncthreads();
  store_bias<C>(p, at, tile);
}

}  // namespace heddle::cuda::sm80::attention_bwd

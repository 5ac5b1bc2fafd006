// Rows of q gathered for a tile of keys of a block: of each pair's rows the output over these keys alone, normalised,
// and its lse.
#pragma once

#include <cfloat>

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/scores.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/sparse/rows.cuh"
#include "cuda/sm80/sparse_fwd/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

using attention::kGroupRows;
using attention::recomputed;
using attention::swizzled;

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

template <class T, int kHead>
struct Config {
  using Element = T;
  static constexpr int kTileRows = 128, kTileK = kTileKeys;
  static constexpr int kGroups = kTileRows / kWarps / kGroupRows, kBlocks = kTileK / 8;  // of a warp's scores
  static constexpr int kHeadSize = kHead;
  static constexpr std::uint32_t kPitch = kHead * sizeof(T);
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  attention::Tile<T, kTileKeys, C::kHeadSize> k, v;
  attention::Tile<T, C::kTileRows, C::kHeadSize> q;
  struct Rows {
    const std::byte* q[C::kTileRows];
    int place[C::kTileRows];
    unsigned keys[C::kTileRows];
  } rows[2];  // of even and of odd tiles
  Named named[kItemPairs];
  Item item;
  Sequence s;
};

// Finds the rows of a tile: a thread has one.
template <class C>
__device__ inline void find_rows(const Params& p, int tile, int sub, SharedMemory<C>& shared) {
  static_assert(C::kTileRows == kThreads);
  const int row = static_cast<int>(threadIdx.x);
  const sparse::FoundRow found =
      sparse::find_row(p, shared.item, shared.s, shared.named, tile * C::kTileRows + row, sub);
  auto& rows = shared.rows[tile % 2];
  rows.place[row] = found.place;
  rows.keys[row] = found.keys;
  if (found.place >= 0) rows.q[row] = p.problem.q.at(shared.item.b, shared.s.q_begin + found.i, found.h);
}

// A warp's share of a tile, from scores to weights exp(score - largest): as the second product takes them, with their
// inverse sum of each row, 0 for one without keys. Writes lse.
template <class C>
struct Weights {
  std::uint32_t of[C::kGroups][C::kTileK / 16][4];
  float inverse[C::kGroups][2];
  std::uint32_t attended;  // as attended_keys() has it

  __device__ __forceinline__ void find(const Params& p, int tile, const SharedMemory<C>& shared) {
    const unsigned warp = threadIdx.x / kWarp, lane = recomputed(threadIdx.x % kWarp, tile);
    const unsigned row0 = warp * (C::kGroups * kGroupRows);
    const auto& rows = shared.rows[tile % 2];
    float s[C::kGroups][C::kBlocks][4] = {};
    multiply_by_keys(s, ptx::shared_address(&shared.q) + row0 * C::kPitch, ptx::shared_address(&shared.k), lane);
    bool whole = true;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        whole = whole && rows.keys[row0 + kGroupRows * g + 8 * r + lane / 4] == kTileKeys << 16;
#pragma unroll
        for (int n = 0; n < C::kBlocks; ++n) {
          s[g][n][2 * r] *= p.scale_log2;
          s[g][n][2 * r + 1] *= p.scale_log2;
        }
      }
    }
    attended = ~0u;
    if (!__all_sync(0xffffffff, whole)) {
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned keys = rows.keys[row0 + kGroupRows * g + 8 * r + lane / 4];
          const int begin = static_cast<int>(keys & 0xffff), end = static_cast<int>(keys >> 16);
          keep_keys<C::kBlocks>(begin, static_cast<unsigned>(end - begin), static_cast<int>(2 * (lane % 4)),
                                [&](int n) { return &s[g][n][2 * r]; });
        }
      }
      attended = attention::attended_keys<C>(s);
    }
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kBlocks; ++n) top = fmaxf(top, fmaxf(s[g][n][2 * r], s[g][n][2 * r + 1]));
        top = largest_of_quad(top);
        const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
        for (int n = 0; n < C::kBlocks; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[g][n][2 * r + c];
            x = ptx::exp2_approx(x - base);
            sum += x;
          }
        }
        sum = sum_of_quad(sum);
        inverse[g][r] = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        const int place = rows.place[row0 + kGroupRows * g + 8 * r + lane / 4];
        if (place >= 0 && lane % 4 == 0) p.lse[place] = sum == 0.0f ? -INFINITY : top * kLn2 + __logf(sum);
      }
#pragma unroll
      for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = s[g][2 * step + i / 2];
          of[g][step][i] = ptx::pack2<typename C::Element>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      }
    }
  }

 private:
  // q: the warp's first row; k: the tile's.
  __device__ static void multiply_by_keys(float (&s)[C::kGroups][C::kBlocks][4], std::uint32_t q, std::uint32_t k,
                                          unsigned lane) {
    const std::uint32_t q_at = q + swizzled(C::kPitch, lane % 16, lane / 16);
    const std::uint32_t k_at = k + swizzled(C::kPitch, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 16; ++step) {
      std::uint32_t x[C::kGroups][4];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        ptx::load_matrix_x4(x[g], (q_at ^ step << 5) + g * kGroupRows * C::kPitch);
      }
#pragma unroll
      for (int n = 0; n < C::kBlocks / 2; ++n) {
        std::uint32_t y[4];
        ptx::load_matrix_x4(y, (k_at ^ step << 5) + n * 16 * C::kPitch);
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          ptx::mma_16816<typename C::Element>(s[g][2 * n], x[g], y[0], y[1]);
          ptx::mma_16816<typename C::Element>(s[g][2 * n + 1], x[g], y[2], y[3]);
        }
      }
    }
  }
};

// O of a warp's rows, 32 columns at a time, each relative to its largest. Each row's halves in pieces of 16 bytes: that
// of lane c of a quad has columns 8 t + 2 c and the next, for t from 0 to 3.
template <class C>
__device__ inline void store_outputs(const Params& p, int tile, const Weights<C>& weights,
                                     const SharedMemory<C>& shared) {
  const unsigned warp = threadIdx.x / kWarp, lane = recomputed(threadIdx.x % kWarp, tile);
  const auto& rows = shared.rows[tile % 2];
  const std::uint32_t v_at = ptx::shared_address(&shared.v);
#pragma unroll 1
  for (unsigned piece = 0; piece < C::kHeadSize / 32; ++piece) {
    float o[C::kGroups][4][4] = {};
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      // What no row meets may be anything, and zero times NaN is not zero.
      const std::uint32_t low = halves(weights.attended >> (4 * step)),
                          high = halves(weights.attended >> (4 * step + 2));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
        ptx::load_matrix_x4_transposed(
            v, v_at + swizzled(C::kPitch, 16 * step + lane % 16, 4 * piece + 2 * n + lane / 16));
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          ptx::mma_16816<typename C::Element>(o[g][2 * n], weights.of[g][step], v[0] & low, v[1] & high);
          ptx::mma_16816<typename C::Element>(o[g][2 * n + 1], weights.of[g][step], v[2] & low, v[3] & high);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) largest = fmaxf(largest, fmaxf(fabsf(o[g][n][2 * r]), fabsf(o[g][n][2 * r + 1])));
        largest = largest_of_quad(largest);
        // So that halves hold any row; what is not finite stays so by itself.
        const bool finite = largest >= FLT_MIN && largest < INFINITY;
        const float factor = finite ? __fdividef(1.0f, largest) : 1.0f;
        const std::int64_t place = rows.place[warp * (C::kGroups * kGroupRows) + kGroupRows * g + 8 * r + lane / 4];
        if (place < 0) continue;
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          words[n] = ptx::pack2<__half>(o[g][n][2 * r] * factor, o[g][n][2 * r + 1] * factor);
        }
        reinterpret_cast<uint4*>(p.partial + place * C::kHeadSize + 32 * piece)[lane % 4] =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (lane % 4 == 0) {
          p.scales[place * (C::kHeadSize / 32) + piece] = (finite ? largest : 1.0f) * weights.inverse[g][r];
        }
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 3) partial_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const int work = static_cast<int>(blockIdx.x) / p.subs, sub = static_cast<int>(blockIdx.x) - work * p.subs;
  const SparseProblem& problem = p.problem;
  if (p.direct) {
    const sparse::FoundPair found = sparse::find_pair(p, work);
    if (threadIdx.x == 0) {
      if (sub == 0) p.place_of[work] = found.says ? 0 : -1;
      shared.item = found.item;
      shared.named[0] = found.named;
    }
    if (!found.says) return;
  } else {
    if (work >= *p.items_there) return;
    if (threadIdx.x == 0) shared.item = p.items[work];
  }
  if (threadIdx.x == 0) shared.s = problem.sequence(shared.item.b);
  __syncthreads();
  const int count = shared.item.count, rows = count * p.rows, tiles = (rows + C::kTileRows - 1) / C::kTileRows;
  sparse::load_keys<kThreads>(p, shared.item, shared.s, sub, problem.k, problem.D, shared.k);
  sparse::load_keys<kThreads>(p, shared.item, shared.s, sub, problem.v, problem.Dv, shared.v);
  if (!p.direct) {
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) {
      shared.named[n] = p.named[shared.item.first + n];
    }
  }
  __syncthreads();
  find_rows<C>(p, 0, sub, shared);
  __syncthreads();
  const auto load = [&](int tile) {
    const auto& rows = shared.rows[tile % 2];
    sparse::load_rows<kThreads>(rows.q, rows.place, problem.q, problem.D,
                                static_cast<int>(recomputed(threadIdx.x, tile)), shared.q);
  };
  load(0);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::copy_async_wait<0>();
    __syncthreads();  // the tile is there, and all warps are done with what was found for the one before
    if (tile + 1 < tiles) find_rows<C>(p, tile + 1, sub, shared);
    const int first_row = tile * C::kTileRows + static_cast<int>(threadIdx.x / kWarp) * (C::kGroups * kGroupRows);
    const bool has_rows = first_row < rows;  // the warp
    Weights<C> weights;
    if (has_rows) weights.find(p, tile, shared);
    __syncthreads();  // all warps have read q, and know the next rows
    if (tile + 1 < tiles) load(tile + 1);
    ptx::copy_async_commit();
    if (has_rows) store_outputs<C>(p, tile, weights, shared);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

// Rows of q gathered for a tile of keys of a block: of each pair's rows the output over these keys alone, normalised,
// and its lse.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/scores.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/sparse/rows.cuh"
#include "cuda/sm80/sparse_fwd/params.h"
#include "cuda/sm80/sparse_fwd/rows_out.cuh"

namespace heddle::cuda::sm80::sparse_fwd {

using attention::kGroupRows;
using attention::recomputed;
using attention::swizzled;

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr unsigned kAllKeys = kTileKeys << 16;  // of a tile, as FoundRow has them

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
  // Of the item: its rows at a position, one for each head of the unit. place: of the first; -1 where there is none.
  struct Position {
    const std::byte* q;
    int place;
    unsigned keys;
  } positions[kItemPositions];
  Item item;
  Sequence s;
  Band band;
  float largest[kWarps][C::kHeadSize / 32];  // of the values' columns, as each warp found it
};

template <class C>
__device__ inline void find_positions(const Params& p, int count, int sub, SharedMemory<C>& shared) {
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads) {
    const sparse::FoundRow found =
        sparse::find_row(p, shared.item, shared.band, p.named + shared.item.first, n * p.group, sub);
    const std::byte* const q =
        found.place >= 0 ? p.problem.q.at(shared.item.b, shared.s.q_begin + found.i, found.h) : nullptr;
    shared.positions[n] = {q, found.place, found.keys};
  }
}

// Finds the rows of a tile: a thread has one. count: of positions.
template <class C>
__device__ inline void find_rows(const Params& p, int tile, int count, SharedMemory<C>& shared) {
  static_assert(C::kTileRows == kThreads);
  const int row = static_cast<int>(threadIdx.x), of_item = tile * C::kTileRows + row;
  const int n = p.by_group.quotient(of_item), within = of_item - n * p.group;
  typename SharedMemory<C>::Position at{nullptr, -1, 0};
  if (n < count) at = shared.positions[n];
  const bool there = at.place >= 0;
  auto& rows = shared.rows[tile % 2];
  rows.place[row] = there ? at.place + within : -1;
  rows.keys[row] = at.keys;
  // One that is not there meets no key and is not written: any will do.
  const std::int64_t pitch = p.problem.q.stride_h * static_cast<std::int64_t>(sizeof(typename C::Element));
  rows.q[row] = there ? at.q + within * pitch : p.problem.q.data;
}

template <class C>
__device__ inline void load_rows(const Params& p, int tile, SharedMemory<C>& shared) {
  using Tile = attention::Tile<typename C::Element, C::kTileRows, C::kHeadSize>;
  constexpr unsigned kPass = kThreads / Tile::kChunks;
  const unsigned thread = recomputed(threadIdx.x, tile), first = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
  const auto& rows = shared.rows[tile % 2];
  const bool exists = static_cast<int>(Tile::kPerChunk * chunk) < p.problem.D;
  const unsigned column = exists ? 16 * chunk : 0;
  const std::uint32_t to = ptx::shared_address(&shared.q);
#pragma unroll 8
  for (unsigned row = first; row < C::kTileRows; row += kPass) {
    ptx::copy_async_16(to + swizzled(Tile::kPitch, row, chunk), rows.q[row] + column, exists);
  }
}

// The largest finite magnitude of each 32 columns of the values, of those that a warp reads.
template <class C>
__device__ inline void find_largest(SharedMemory<C>& shared) {
  using Tile = attention::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  constexpr unsigned kPass = kThreads / Tile::kChunks;
  const unsigned lane = threadIdx.x % kWarp, chunk = threadIdx.x % Tile::kChunks;
  const std::uint32_t from = ptx::shared_address(&shared.v);
  float largest = 0.0f;
#pragma unroll 1
  for (unsigned row = threadIdx.x / Tile::kChunks; row < kTileKeys; row += kPass) {
    const uint4 piece = ptx::load_shared_16(from + swizzled(Tile::kPitch, row, chunk));
#pragma unroll
    for (const std::uint32_t words : {piece.x, piece.y, piece.z, piece.w}) {
      const float2 two = ptx::unpack2<typename C::Element>(words);
      largest = fmaxf(largest, fabsf(two.x) < INFINITY ? fabsf(two.x) : 0.0f);
      largest = fmaxf(largest, fabsf(two.y) < INFINITY ? fabsf(two.y) : 0.0f);
    }
  }
  // 4 chunks have 32 columns; lanes Tile::kChunks apart have the same.
#pragma unroll
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    if (lanes >= 4 && lanes < Tile::kChunks) continue;
    largest = fmaxf(largest, __shfl_xor_sync(sparse::kAll, largest, lanes));
  }
  if (lane < Tile::kChunks && lane % 4 == 0) shared.largest[threadIdx.x / kWarp][lane / 4] = largest;
}

// A warp's share of a tile, from scores to weights exp(score - largest): as the second product takes them, with their
// inverse sum of each row, 0 for one without keys. Writes lse.
template <class C>
struct Weights {
  std::uint32_t of[C::kGroups][C::kTileK / 16][4];
  float inverse[C::kGroups][2];
  bool whole;              // each row meets all keys
  std::uint32_t attended;  // where not: as attended_keys() has it

  __device__ __forceinline__ void find(const Params& p, int tile, const SharedMemory<C>& shared) {
    const unsigned warp = threadIdx.x / kWarp, lane = recomputed(threadIdx.x % kWarp, tile);
    const unsigned row0 = warp * (C::kGroups * kGroupRows);
    const auto& rows = shared.rows[tile % 2];
    float s[C::kGroups][C::kBlocks][4] = {};
    multiply_by_keys(s, ptx::shared_address(&shared.q) + row0 * C::kPitch, ptx::shared_address(&shared.k), lane);
    bool all = true;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) all = all && rows.keys[row0 + kGroupRows * g + 8 * r + lane / 4] == kAllKeys;
    }
    whole = __all_sync(sparse::kAll, all);
    float scale = p.scale_log2;
    if (scale <= 0.0f) {  // so that the largest is the one after scaling, and what is masked stays so
      for_all(s, [&](float& x) { x *= scale; });
      scale = 1.0f;
    }
    if (!whole) {
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
    // The four rows of a lane side by side: of one alone each instruction would wait for the one before.
    float top[C::kGroups][2], base[C::kGroups][2], sum[C::kGroups][2] = {};
    const auto for_rows = [](auto visit) {
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) visit(g, r);
      }
    };
    for_rows([&](int g, int r) { top[g][r] = -INFINITY; });
#pragma unroll
    for (int n = 0; n < C::kBlocks; ++n) {
      for_rows([&](int g, int r) { top[g][r] = fmaxf(top[g][r], fmaxf(s[g][n][2 * r], s[g][n][2 * r + 1])); });
    }
    for_rows([&](int g, int r) {
      top[g][r] = largest_of_quad(top[g][r]) * scale;
      base[g][r] = top[g][r] == -INFINITY ? 0.0f : top[g][r];
    });
#pragma unroll
    for (int n = 0; n < C::kBlocks; ++n) {
      for_rows([&](int g, int r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[g][n][2 * r + c];
          x = ptx::exp2_approx(fmaf(x, scale, -base[g][r]));
          sum[g][r] += x;
        }
      });
    }
    for_rows([&](int g, int r) {
      sum[g][r] = sum_of_quad(sum[g][r]);
      inverse[g][r] = sum[g][r] == 0.0f ? 0.0f : __fdividef(1.0f, sum[g][r]);
    });
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = s[g][2 * step + i / 2];
          of[g][step][i] = ptx::pack2<typename C::Element>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      }
    }
    if (lane % 4 == 0) {
      for_rows([&](int g, int r) {
        const int place = rows.place[row0 + kGroupRows * g + 8 * r + lane / 4];
        if (place >= 0) p.lse[place] = sum[g][r] == 0.0f ? -INFINITY : top[g][r] * kLn2 + __logf(sum[g][r]);
      });
    }
  }

 private:
  template <class Visit>
  __device__ static void for_all(float (&s)[C::kGroups][C::kBlocks][4], Visit visit) {
#pragma unroll
    for (auto& group : s) {
#pragma unroll
      for (auto& block : group) {
#pragma unroll
        for (float& x : block) visit(x);
      }
    }
  }

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

// 32 columns of O of a warp's rows, weights yet to be divided by their sum.
template <class C, bool kWhole>
__device__ __forceinline__ void multiply_by_values(float (&o)[C::kGroups][4][4], unsigned piece, unsigned lane,
                                                   const Weights<C>& weights, std::uint32_t v_at) {
#pragma unroll
  for (int step = 0; step < C::kTileK / 16; ++step) {
    // What no row meets may be anything, and zero times NaN is not zero.
    const std::uint32_t low = kWhole ? 0 : halves(weights.attended >> (4 * step)),
                        high = kWhole ? 0 : halves(weights.attended >> (4 * step + 2));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
      ptx::load_matrix_x4_transposed(v,
                                     v_at + swizzled(C::kPitch, 16 * step + lane % 16, 4 * piece + 2 * n + lane / 16));
      if constexpr (!kWhole) {
        v[0] &= low, v[1] &= high;
        v[2] &= low, v[3] &= high;
      }
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        ptx::mma_16816<typename C::Element>(o[g][2 * n], weights.of[g][step], v[0], v[1]);
        ptx::mma_16816<typename C::Element>(o[g][2 * n + 1], weights.of[g][step], v[2], v[3]);
      }
    }
  }
}

// O of a warp's rows, 32 columns at a time. Halves are relative to the largest of the values' columns, which no average
// of them exceeds, and for a row that does not meet all keys, whose bits the others must not change, to its own
// largest.
template <class C>
__device__ inline void store_outputs(const Params& p, int tile, const Weights<C>& weights,
                                     const SharedMemory<C>& shared) {
  constexpr unsigned kPieces = C::kHeadSize / 32;
  const unsigned warp = threadIdx.x / kWarp, lane = recomputed(threadIdx.x % kWarp, tile);
  const auto& rows = shared.rows[tile % 2];
  const unsigned first = warp * (C::kGroups * kGroupRows) + lane / 4;
  const std::uint32_t v_at = ptx::shared_address(&shared.v);
  int place[C::kGroups][2];
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
    place[g][0] = rows.place[first + kGroupRows * g];
    place[g][1] = rows.place[first + kGroupRows * g + 8];
  }
#pragma unroll
  for (unsigned piece = 0; piece < kPieces; ++piece) {
    float o[C::kGroups][4][4] = {}, unit[C::kGroups][2], factor[C::kGroups][2];
    float largest = shared.largest[0][piece];
#pragma unroll
    for (int n = 1; n < kWarps; ++n) largest = fmaxf(largest, shared.largest[n][piece]);
    const float of_tile = unit_of(largest);
    if (weights.whole) {
      multiply_by_values<C, true>(o, piece, lane, weights, v_at);
      const float inverse = __fdividef(1.0f, of_tile);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unit[g][r] = of_tile;
          factor[g][r] = weights.inverse[g][r] * inverse;
        }
      }
    } else {
      multiply_by_values<C, false>(o, piece, lane, weights, v_at);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          largest = 0.0f;
#pragma unroll
          for (int n = 0; n < 4; ++n) largest = fmaxf(largest, fmaxf(fabsf(o[g][n][2 * r]), fabsf(o[g][n][2 * r + 1])));
          largest = largest_of_quad(largest) * weights.inverse[g][r];
          const bool meets_all = rows.keys[first + kGroupRows * g + 8 * r] == kAllKeys;
          unit[g][r] = meets_all ? of_tile : unit_of(largest < INFINITY ? largest : 1.0f);
          factor[g][r] = weights.inverse[g][r] * __fdividef(1.0f, unit[g][r]);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[8];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          x[2 * n] = o[g][n][2 * r];
          x[2 * n + 1] = o[g][n][2 * r + 1];
        }
        if (place[g][r] < 0) continue;
        write_partial<C::kHeadSize>(p, place[g][r], 4 * piece + lane % 4, x, factor[g][r], unit[g][r]);
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
  if (work >= *p.items_there) return;
  if (threadIdx.x == 0) {
    shared.item = p.items[work];
    shared.s = problem.sequence(shared.item.b);
    shared.band = p.band(shared.s);
  }
  __syncthreads();
  const int rows = shared.item.count * p.rows, tiles = (rows + C::kTileRows - 1) / C::kTileRows;
  const int positions = shared.item.count * static_cast<int>(problem.lists.query_rows);
  sparse::load_keys<kThreads>(p, shared.item, shared.s, shared.band, sub, problem.k, problem.D, shared.k);
  sparse::load_keys<kThreads>(p, shared.item, shared.s, shared.band, sub, problem.v, problem.Dv, shared.v);
  find_positions(p, positions, sub, shared);
  __syncthreads();
  find_rows<C>(p, 0, positions, shared);
  __syncthreads();
  load_rows<C>(p, 0, shared);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::copy_async_wait<0>();
    __syncthreads();  // the tile is there, and all warps are done with what was found for the one before
    if (tile == 0) find_largest(shared);
    if (tile + 1 < tiles) find_rows<C>(p, tile + 1, positions, shared);
    const int first_row = tile * C::kTileRows + static_cast<int>(threadIdx.x / kWarp) * (C::kGroups * kGroupRows);
    const bool has_rows = first_row < rows;  // the warp
    Weights<C> weights;
    if (has_rows) weights.find(p, tile, shared);
    __syncthreads();  // all warps have read q, and know the next rows, and what they found
    if (tile + 1 < tiles) load_rows<C>(p, tile + 1, shared);
    ptx::copy_async_commit();
    if (has_rows) store_outputs<C>(p, tile, weights, shared);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

// Rows of q gathered for a tile of keys of a block: of each pair's rows the output over these keys alone, normalised,
// and its lse.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/sparse/rows.cuh"
#include "cuda/common/sparse/tile.cuh"
#include "cuda/common/sparse_fwd/params.h"
#include "cuda/common/sparse_fwd/rows_out.cuh"
#include "cuda/common/wgmma.cuh"

namespace heddle::cuda::sparse_fwd::by_keys {

constexpr unsigned kAllKeys = kTileKeys << 16;  // of a tile, as FoundRow has them

// kWgmma: products by wgmma, two warpgroups of 64 rows; else by mma.sync, four warps of 32.
template <class T, int kHead, bool kHopper>
struct Config {
  using Element = T;
  static constexpr bool kWgmma = kHopper;
  static constexpr int kTileRows = 128, kTileK = kTileKeys, kHeadSize = kHead;
  static constexpr int kThreads = kWgmma ? 256 : 128, kWarps = kThreads / kWarp, kCtas = kWgmma ? 2 : 3;
  static constexpr int kGroups = kTileRows / kWarps / kGroupRows, kBlocks = kTileK / 8;  // of a warp's scores
  static constexpr int kColumns = kWgmma ? 64 : 32;                                      // of O at a time
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  sparse::Tile<T, kTileKeys, C::kHeadSize> k, v;
  sparse::Tile<T, C::kTileRows, C::kHeadSize> q;
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
  float largest[C::kWarps][C::kHeadSize / 32];  // of the values' columns, as each warp found it
};

template <class C>
__device__ inline void find_positions(const Params& p, int count, int sub, SharedMemory<C>& shared) {
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < count; n += C::kThreads) {
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
  static_assert(C::kTileRows <= C::kThreads);
  const int row = static_cast<int>(threadIdx.x);
  if (row >= C::kTileRows) return;
  const int of_item = tile * C::kTileRows + row;
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
  using Tile = sparse::Tile<typename C::Element, C::kTileRows, C::kHeadSize>;
  constexpr unsigned kPass = C::kThreads / Tile::kChunks;
  const unsigned thread = recomputed(static_cast<int>(threadIdx.x)), first = thread / Tile::kChunks,
                 chunk = thread % Tile::kChunks;
  const auto& rows = shared.rows[tile % 2];
  const bool exists = static_cast<int>(Tile::kPerChunk * chunk) < p.problem.D;
  const unsigned column = exists ? 16 * chunk : 0;
  const std::uint32_t to = ptx::shared_address(&shared.q);
#pragma unroll 8
  for (unsigned row = first; row < C::kTileRows; row += kPass) {
    ptx::copy_async_16(to + Tile::offset(row, chunk), rows.q[row] + column, exists);
  }
}

// The largest finite magnitude of each 32 columns of the values, of those that a warp reads.
template <class C>
__device__ inline void find_largest(SharedMemory<C>& shared) {
  using Tile = sparse::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  constexpr unsigned kPass = C::kThreads / Tile::kChunks;
  const unsigned lane = threadIdx.x % kWarp, chunk = threadIdx.x % Tile::kChunks;
  const std::uint32_t from = ptx::shared_address(&shared.v);
  float largest = 0.0f;
#pragma unroll 1
  for (unsigned row = threadIdx.x / Tile::kChunks; row < kTileKeys; row += kPass) {
    const uint4 piece = ptx::load_shared_16(from + Tile::offset(row, chunk));
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
  bool whole;              // each row meets all keys: of the warp, or by wgmma of the warpgroup
  std::uint32_t attended;  // where not: as attended_keys() has it

  __device__ __forceinline__ void find(const Params& p, int tile, const SharedMemory<C>& shared) {
    const unsigned warp = threadIdx.x / kWarp, lane = recomputed(static_cast<int>(threadIdx.x)) % kWarp;
    const unsigned row0 = warp * (C::kGroups * kGroupRows);
    const auto& rows = shared.rows[tile % 2];
    float s[C::kGroups][C::kBlocks][4] = {};
    multiply_by_keys(s, shared, row0, lane);
    // Of the rows that are multiplied together: the warp's, or the warpgroup's.
    const unsigned first = C::kWgmma ? row0 / 64 * 64 : row0, count = C::kWgmma ? 64 : C::kGroups * kGroupRows;
    bool all = true;
#pragma unroll
    for (unsigned n = 0; n < count; n += kWarp) all = all && rows.keys[first + n + lane] == kAllKeys;
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
      attended = attended_keys(s);
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

  // row0: the warp's first.
  __device__ static void multiply_by_keys(float (&s)[C::kGroups][C::kBlocks][4], const SharedMemory<C>& shared,
                                          unsigned row0, unsigned lane) {
    if constexpr (C::kWgmma) {
      auto& sums = reinterpret_cast<float(&)[C::kTileK / 2]>(s);
      const Swizzled128 q(shared.q.panel[0][row0 / 64 * 64]), k(&shared.k);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
        Wgmma<typename C::Element, C::kTileK>::template shared_shared<>(
            sums, q.at(step / 4 * decltype(shared.q)::kPanelBytes + step % 4 * 32),
            k.at(step / 4 * decltype(shared.k)::kPanelBytes + step % 4 * 32), step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(sums);
    } else {
      const std::uint32_t q_at =
          ptx::shared_address(&shared.q) + decltype(shared.q)::offset(row0 + lane % 16, lane / 16);
      const std::uint32_t k_at =
          ptx::shared_address(&shared.k) + decltype(shared.k)::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
        const std::uint32_t within = step % 4 << 5;
        std::uint32_t x[C::kGroups][4];
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          ptx::load_matrix_x4(x[g], (q_at ^ within) + step / 4 * decltype(shared.q)::kPanelBytes +
                                        g * kGroupRows * decltype(shared.q)::kRowBytes);
        }
#pragma unroll
        for (int n = 0; n < C::kBlocks / 2; ++n) {
          std::uint32_t y[4];
          ptx::load_matrix_x4(
              y, (k_at ^ within) + step / 4 * decltype(shared.k)::kPanelBytes + n * 16 * decltype(shared.k)::kRowBytes);
#pragma unroll
          for (int g = 0; g < C::kGroups; ++g) {
            ptx::mma_16816<typename C::Element>(s[g][2 * n], x[g], y[0], y[1]);
            ptx::mma_16816<typename C::Element>(s[g][2 * n + 1], x[g], y[2], y[3]);
          }
        }
      }
    }
  }
};

// Columns of O of a warp's rows, from `column` on, weights yet to be divided by their sum.
template <class C, bool kWhole>
__device__ __forceinline__ void multiply_by_values(float (&o)[C::kGroups][C::kColumns / 8][4], unsigned column,
                                                   unsigned lane, const Weights<C>& weights,
                                                   const SharedMemory<C>& shared) {
  using Values = decltype(shared.v);
  if constexpr (C::kWgmma && kWhole) {
    static_assert(C::kGroups == 1 && C::kColumns == 64);
    auto& sums = reinterpret_cast<float(&)[C::kColumns / 2]>(o);
    const Swizzled128 v(shared.v.panel[column / 64]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      Wgmma<typename C::Element, C::kColumns>::template registers_shared<true>(
          sums, weights.of[0][step], v.at(step * 16 * Values::kRowBytes), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(sums);
  } else {
    const std::uint32_t v_at = ptx::shared_address(&shared.v);
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      // What no row meets may be anything, and zero times NaN is not zero.
      const std::uint32_t low = kWhole ? 0 : halves(weights.attended >> (4 * step)),
                          high = kWhole ? 0 : halves(weights.attended >> (4 * step + 2));
#pragma unroll
      for (int n = 0; n < C::kColumns / 16; ++n) {
        std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
        ptx::load_matrix_x4_transposed(v, v_at + Values::offset(16 * step + lane % 16, column / 8 + 2 * n + lane / 16));
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
}

// O of a warp's rows. Halves are relative to the largest of the 32 columns' values, which no average of them exceeds,
// and for a row that does not meet all keys, whose bits the others must not change, to its own largest.
template <class C>
__device__ inline void store_outputs(const Params& p, int tile, const Weights<C>& weights,
                                     const SharedMemory<C>& shared) {
  const unsigned warp = threadIdx.x / kWarp, lane = recomputed(static_cast<int>(threadIdx.x)) % kWarp;
  const auto& rows = shared.rows[tile % 2];
  const unsigned first = warp * (C::kGroups * kGroupRows) + lane / 4;
  int place[C::kGroups][2];
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g) {
    place[g][0] = rows.place[first + kGroupRows * g];
    place[g][1] = rows.place[first + kGroupRows * g + 8];
  }
#pragma unroll
  for (unsigned column = 0; column < C::kHeadSize; column += C::kColumns) {
    float o[C::kGroups][C::kColumns / 8][4] = {};
    if (weights.whole) {
      multiply_by_values<C, true>(o, column, lane, weights, shared);
    } else {
      multiply_by_values<C, false>(o, column, lane, weights, shared);
    }
#pragma unroll
    for (int part = 0; part < C::kColumns / 32; ++part) {
      const unsigned piece = column / 32 + part;
      float largest = shared.largest[0][piece];
#pragma unroll
      for (int n = 1; n < C::kWarps; ++n) largest = fmaxf(largest, shared.largest[n][piece]);
      const float of_tile = unit_of(largest), inverse = __fdividef(1.0f, of_tile);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x[8], unit = of_tile, factor = weights.inverse[g][r] * inverse;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            x[2 * n] = o[g][4 * part + n][2 * r];
            x[2 * n + 1] = o[g][4 * part + n][2 * r + 1];
          }
          if (!weights.whole) {
            largest = 0.0f;
#pragma unroll
            for (const float y : x) largest = fmaxf(largest, fabsf(y));
            largest = largest_of_quad(largest) * weights.inverse[g][r];
            if (rows.keys[first + kGroupRows * g + 8 * r] != kAllKeys) {
              unit = unit_of(largest < INFINITY ? largest : 1.0f);
              factor = weights.inverse[g][r] * __fdividef(1.0f, unit);
            }
          }
          if (place[g][r] >= 0) write_partial<C::kHeadSize>(p, place[g][r], 4 * piece + lane % 4, x, factor, unit);
        }
      }
    }
  }
}

// A tile of an item's keys, number n of all items' tiles: partial results of all its rows. kAgain: the CTA has
// several.
template <class C, bool kAgain>
__device__ __forceinline__ void meet_item(const Params& p, int n, SharedMemory<C>& shared) {
  const int work = n / p.subs, sub = n - work * p.subs;
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
  sparse::load_keys<C::kThreads, kAgain>(p, shared.item, shared.s, shared.band, sub, problem.k, problem.D, shared.k);
  sparse::load_keys<C::kThreads, kAgain>(p, shared.item, shared.s, shared.band, sub, problem.v, problem.Dv, shared.v);
  find_positions(p, positions, sub, shared);
  __syncthreads();
  find_rows<C>(p, 0, positions, shared);
  __syncthreads();
  load_rows<C>(p, 0, shared);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::copy_async_wait<0>();
    if constexpr (C::kWgmma) ptx::fence_async_shared();
    __syncthreads();  // the tile is there, and all warps are done with what was found for the one before
    if (tile == 0) find_largest(shared);
    if (tile + 1 < tiles) find_rows<C>(p, tile + 1, positions, shared);
    const int first_row = tile * C::kTileRows + static_cast<int>(threadIdx.x / kWarp) * (C::kGroups * kGroupRows);
    const bool has_rows = (C::kWgmma ? first_row / 64 * 64 : first_row) < rows;  // the warp, or warpgroup
    Weights<C> weights;
    if (has_rows) weights.find(p, tile, shared);
    __syncthreads();  // all warps have read q, and know the next rows, and what they found
    if (tile + 1 < tiles) load_rows<C>(p, tile + 1, shared);
    ptx::copy_async_commit();
    if (has_rows) store_outputs<C>(p, tile, weights, shared);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) partial_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  meet_item<C, false>(p, static_cast<int>(blockIdx.x), *reinterpret_cast<SharedMemory<C>*>(memory));
}

}  // namespace heddle::cuda::sparse_fwd::by_keys

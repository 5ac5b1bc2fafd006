// Rows of q and d_o gathered for a tile of keys of a block: dK and dV stay in registers over an item, and of each
// pair's rows dQ over these keys alone goes to memory. The products are those of the dense backward
// (cuda/sm80/attention_bwd/kernel.cuh), in the same three ways of dividing a matrix among the warps.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/sparse/rows.cuh"
#include "cuda/sm80/attention_bwd/loader.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"
#include "cuda/sm80/attention_bwd/variants.h"
#include "cuda/sm80/sparse_bwd/params.h"

namespace heddle::cuda::sm80::sparse_bwd {

using attention::kGroupRows;
using attention::recomputed_by_tile;
using attention::swizzled;
using attention::Tile;
using attention_bwd::clear;
using attention_bwd::for_each_pair;

// With score options: products leave out keys that no row of a tile meets.
template <class T, int kHead>
using Config = attention_bwd::Config<T, 1, kHead, kHead == 64 ? attention_bwd::kD64 : attention_bwd::kD128,
                                     /*kScoreOptions=*/true>;

// Where a tile's rows are, and what of the tile of keys they meet.
template <class C>
struct Rows {
  const std::byte *q[C::kTileQ], *d_o[C::kTileQ];
  std::int64_t at[C::kTileQ];  // in lse_log2 and delta
  int place[C::kTileQ];        // in `partial`; -1: there is no such row
  unsigned keys[C::kTileQ];    // begin, and from bit 16 on the end
};

template <class C>
struct SharedMemory {
  using T = typename C::Element;
  Tile<T, kTileKeys, C::kHeadSize> k, v;
  Tile<T, C::kTileQ, C::kHeadSize> q, d_o;
  Tile<T, C::kTileQ, C::kPairColumns> p, ds;
  alignas(16) float lse_log2[C::kTileQ], delta[C::kTileQ];
  Rows<C> rows[2];               // of even and of odd tiles
  std::uint32_t attended[2][4];  // as in the dense backward
  Named named[kItemPairs];
  Item item;
  Sequence s;
  Band band;
};

// Finds the rows of a tile: a thread has one. P: as in meet_item().
template <class C, class P>
__device__ inline void find_rows(const P& p, int tile, int sub, SharedMemory<C>& shared) {
  static_assert(C::kTileQ <= C::kThreads);
  const int row = static_cast<int>(threadIdx.x);
  if (row >= C::kTileQ) return;
  const sparse::FoundRow found =
      sparse::find_row(p, shared.item, shared.band, shared.named, tile * C::kTileQ + row, sub);
  Rows<C>& rows = shared.rows[tile % 2];
  rows.place[row] = found.place;
  rows.keys[row] = found.keys;
  if (found.place < 0) return;
  const std::int64_t first = [&] {
    using any::attention_bwd_rows::first_row;
    if constexpr (std::is_same_v<P, Params>) {
      return first_row(p.problem, shared.item.b, shared.s);
    } else {
      return first_row(p.problem, shared.item.b, shared.s, p.rows_of_sequence);
    }
  }();
  rows.at[row] = found.h * p.rows_per_head + first + found.i;
  rows.q[row] = p.problem.q.at(shared.item.b, shared.s.q_begin + found.i, found.h);
  rows.d_o[row] = p.d_o.at(shared.item.b, shared.s.q_begin + found.i, found.h);
}

// Rows of q or d_o to a tile. from: where each begins; exists: by its place.
template <int kThreads, class T, int kRows, int kColumns>
__device__ inline void load_tile(const std::byte* const (&from)[kRows], const int (&place)[kRows], const Operand& x,
                                 std::int64_t size, int thread, attention::Tile<T, kRows, kColumns>& tile) {
  using Tile = attention::Tile<T, kRows, kColumns>;
  constexpr int kPass = kThreads / Tile::kChunks;
  const int chunk = thread % Tile::kChunks;
  const std::uint32_t to = ptx::shared_address(&tile);
#pragma unroll 4
  for (int row = thread / Tile::kChunks; row < kRows; row += kPass) {
    const bool exists = place[row] >= 0 && Tile::kPerChunk * chunk < size;
    ptx::copy_async_16(to + Tile::offset(row, chunk), exists ? from[row] + 16 * chunk : x.data, exists);
  }
}

// The rows that find_rows() has found; zeros for those that there are not.
template <class C>
__device__ inline void load_rows(const Params& p, int tile, SharedMemory<C>& shared) {
  const Rows<C>& rows = shared.rows[tile % 2];
  const int thread = static_cast<int>(recomputed_by_tile(threadIdx.x, tile));
  load_tile<C::kThreads>(rows.q, rows.place, p.problem.q, p.problem.D, thread, shared.q);
  if (thread < C::kTileQ) {
    const bool exists = rows.place[thread] >= 0;
    const std::int64_t at = exists ? rows.at[thread] : 0;
    ptx::copy_async_4(ptx::shared_address(shared.lse_log2 + thread), p.lse_log2 + at, exists);
    ptx::copy_async_4(ptx::shared_address(shared.delta + thread), p.delta + at, exists);
  }
  load_tile<C::kThreads>(rows.d_o, rows.place, p.d_o, p.problem.Dv, thread, shared.d_o);
}

// P (in s) and dS, with respect to scale * q . k, of a tile that lies in shared memory. Returns this lane's word of
// keys that a row of the warp meets.
template <class C>
__device__ inline std::uint32_t compute_pairs(const Params& p, int tile, typename C::Scores::Sums& s,
                                              typename C::Scores::Sums& ds, const SharedMemory<C>& shared) {
  using Scores = typename C::Scores;
  const unsigned warp = threadIdx.x / kWarp, lane = recomputed_by_tile(threadIdx.x % kWarp, tile);
  const unsigned row0 = Scores::first_row(warp), key0 = Scores::first_column(warp);
  const Rows<C>& rows = shared.rows[tile % 2];
  const auto at = [](const auto& of, unsigned row) { return ptx::shared_address(&of) + row * C::kPitch; };
  clear(s);
  attention_bwd::multiply_by_transposed<C>(s, at(shared.q, row0), at(shared.k, key0), lane, 0);
  float lse[Scores::kGroups][2];
  bool whole = true;
#pragma unroll
  for (int g = 0; g < Scores::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = row0 + kGroupRows * g + 8 * r + lane / 4, keys = rows.keys[row];
      lse[g][r] = shared.lse_log2[row];
      whole = whole && keys == kTileKeys << 16;
    }
  }
  for_each_pair<C>([&](int g, int n, int i) { s[g][n][i] *= p.scale_log2; });
  std::uint32_t attended = ~0u;
  if (!__all_sync(0xffffffff, whole)) {
#pragma unroll
    for (int g = 0; g < Scores::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned keys = rows.keys[row0 + kGroupRows * g + 8 * r + lane / 4];
        const int begin = static_cast<int>(keys & 0xffff), end = static_cast<int>(keys >> 16);
        keep_keys<Scores::kBlocks>(begin, static_cast<unsigned>(end - begin), static_cast<int>(key0 + 2 * (lane % 4)),
                                   [&](int n) { return &s[g][n][2 * r]; });
      }
    }
    attended = attended_keys(s);
  }
  for_each_pair<C>([&](int g, int n, int i) { s[g][n][i] = ptx::exp2_approx(s[g][n][i] - lse[g][i / 2]); });
#pragma unroll
  for (int g = 0; g < Scores::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float delta = shared.delta[row0 + kGroupRows * g + 8 * r + lane / 4];
#pragma unroll
      for (int n = 0; n < Scores::kBlocks; ++n) ds[g][n][2 * r] = ds[g][n][2 * r + 1] = -delta;
    }
  }
  attention_bwd::multiply_by_transposed<C>(ds, at(shared.d_o, row0), at(shared.v, key0), lane, 0);
  // A pair without probability has no gradient, whatever its key and value hold.
  for_each_pair<C>([&](int g, int n, int i) { ds[g][n][i] = s[g][n][i] == 0.0f ? 0.0f : ds[g][n][i] * s[g][n][i]; });
  return attended;
}

// dQ = dS K of a tile, to `partial`, 32 columns at a time. Each row's halves in pieces of 16 bytes: that of lane c of a
// quad has columns 8 t + 2 c and the next, for t from 0 to 3.
template <class C>
__device__ inline void store_dq(const Params& p, int tile, int parity, const SharedMemory<C>& shared) {
  constexpr int kGroups = C::Rows::kGroups, kPieces = C::Rows::kBlocks / 4;
  const unsigned warp = threadIdx.x / kWarp, lane = recomputed_by_tile(threadIdx.x % kWarp, tile);
  const std::uint32_t attended = shared.attended[parity][lane % 4];
  const attention_bwd::Left<C, kGroups> left(ptx::shared_address(&shared.ds) + C::Rows::first_row(warp) * C::kPairPitch,
                                             lane);
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
    const unsigned column = C::Rows::first_column(warp) + 32 * piece;
    float sums[kGroups][4][4];
    attention_bwd::multiply<C>(sums, left, ptx::shared_address(&shared.k), column, lane, attended);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          largest = fmaxf(largest, fmaxf(fabsf(sums[g][n][2 * r]), fabsf(sums[g][n][2 * r + 1])));
        }
        largest = largest_of_quad(largest);
        // So that halves hold any row; what is not finite stays so by itself.
        const bool finite = largest >= FLT_MIN && largest < INFINITY;
        const float factor = finite ? __fdividef(1.0f, largest) : 1.0f;
        const std::int64_t place =
            shared.rows[tile % 2].place[C::Rows::first_row(warp) + kGroupRows * g + 8 * r + lane / 4];
        if (place < 0) continue;
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          words[n] = ptx::pack2<__half>(sums[g][n][2 * r] * factor, sums[g][n][2 * r + 1] * factor);
        }
        reinterpret_cast<uint4*>(p.partial + place * C::kHeadSize + column)[lane % 4] =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (lane % 4 == 0) p.scales[place * (C::kHeadSize / 32) + column / 32] = finite ? largest : 1.0f;
      }
    }
  }
}

// dK or dV of the CTA's keys: added to what is there, or written. Nobody else has these keys in this launch.
template <class C, bool kAgain>
__device__ inline void store_keys(const typename C::Keys::Sums& sums, float* tile, bool add, int tile_keys) {
  const unsigned thread = sparse::thread_of_item<kAgain>(), warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll
  for (int g = 0; g < C::Keys::kGroups; ++g) {
    const unsigned row = C::Keys::first_row(warp) + kGroupRows * g;
    if (static_cast<int>(row) >= tile_keys) continue;
#pragma unroll
    for (int n = 0; n < C::Keys::kBlocks; ++n) {
      const unsigned fragment = row / kGroupRows * (C::kHeadSize / 8) + C::Keys::first_column(warp) / 8 + n;
      float4* const to = reinterpret_cast<float4*>(tile + fragment * 128) + lane;
      float4 x = {sums[g][n][0], sums[g][n][1], sums[g][n][2], sums[g][n][3]};
      if (add) {
        const float4 before = *to;
        x = {before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w};
      }
      *to = x;
    }
  }
}

// A tile of an item's keys, number n() of all items' tiles: dK and dV, and dQ over them of all its rows. P: Params, or
// what derives from it, of a CTA that has several items: that asks again for what it would have no registers to keep.
template <class C, class P, class Number>
__device__ __forceinline__ void meet_item(const P& p, Number n, SharedMemory<C>& shared) {
  constexpr bool kAgain = !std::is_same_v<P, Params>;
  const int work = n() / p.subs, first_sub = n() - work * p.subs;
  const auto sub = [&] { return kAgain ? n() & (p.subs - 1) : first_sub; };  // there are one or two
  if (work >= *p.items_there) return;
  if (threadIdx.x == 0) {
    shared.item = p.items[work];
    shared.s = p.problem.sequence(shared.item.b);
    shared.band = p.band(shared.s);
  }
  if (threadIdx.x < 8) shared.attended[threadIdx.x / 4][threadIdx.x % 4] = 0;
  __syncthreads();
  const int count = shared.item.count, first_tiles = (count * p.rows + C::kTileQ - 1) / C::kTileQ;
  const auto tiles = [&] { return kAgain ? (shared.item.count * p.rows + C::kTileQ - 1) / C::kTileQ : first_tiles; };
  sparse::load_keys<C::kThreads, kAgain>(p, shared.item, shared.s, shared.band, sub(), p.problem.k, p.problem.D,
                                         shared.k);
  sparse::load_keys<C::kThreads, kAgain>(p, shared.item, shared.s, shared.band, sub(), p.problem.v, p.problem.Dv,
                                         shared.v);
#pragma unroll 1
  for (int n = static_cast<int>(sparse::thread_of_item<kAgain>()); n < count; n += C::kThreads) {
    shared.named[n] = p.named[shared.item.first + n];
  }
  __syncthreads();
  find_rows<C>(p, 0, sub(), shared);
  __syncthreads();
  load_rows<C>(p, 0, shared);
  ptx::copy_async_commit();

  const unsigned warp = threadIdx.x / kWarp;
  typename C::Keys::Sums dk, dv;
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int tile = 0; tile < tiles(); ++tile) {
    const int parity = tile % 2;
    ptx::copy_async_wait<0>();
    __syncthreads();  // the tile is there; all warps are done with the one before, and what was found for it
    if (tile + 1 < tiles()) find_rows<C>(p, tile + 1, sub(), shared);
    if (threadIdx.x < 4) shared.attended[1 - parity][threadIdx.x] = 0;
    attention_bwd::clear_idle_rows<C>(C::kTileQ, shared);
    if (C::kThreads == 32 * C::kScoreWarps || warp < C::kScoreWarps) {
      typename C::Scores::Sums s, ds;
      const std::uint32_t attended = compute_pairs<C>(p, tile, s, ds, shared);
      constexpr std::uint32_t kMine = C::Scores::kBlocks < 16 ? (1u << 2 * C::Scores::kBlocks) - 1 : ~0u;
      const unsigned lane = threadIdx.x % kWarp;
      if (lane < 4) atomicOr(&shared.attended[parity][lane], (attended & kMine) << C::Scores::first_column(warp) / 4);
      attention_bwd::store_pairs<C>(s, ds, tile, shared);
    }
    __syncthreads();

    const unsigned lane = recomputed_by_tile(threadIdx.x % kWarp, tile);
    const unsigned key = C::Keys::first_row(warp), column = C::Keys::first_column(warp);
    attention_bwd::multiply_transposed<C>(dv, ptx::shared_address(&shared.p), key, ptx::shared_address(&shared.d_o),
                                          column, lane);
    attention_bwd::multiply_transposed<C>(dk, ptx::shared_address(&shared.ds), key, ptx::shared_address(&shared.q),
                                          column, lane);
    __syncthreads();  // all warps have read q, d_o and P; dS and K stay for dQ
    if (tile + 1 < tiles()) load_rows<C>(p, tile + 1, shared);
    ptx::copy_async_commit();
    if (p.dq.data != nullptr) store_dq<C>(p, tile, parity, shared);
  }
  if (p.dk.data == nullptr && p.dv.data == nullptr) return;
  const std::int64_t size = std::int64_t{p.tile_keys} * C::kHeadSize;
  const bool first = shared.item.nth == 0;
  const std::int64_t number =
      shared.item.kv_head * p.blocks + p.first_block(shared.item.b, shared.s) + shared.item.block;
  float* const to = first ? p.sums + (number * p.subs + sub()) * 2 * size
                          : p.others + (p.other(shared.item) * p.subs + sub()) * 2 * size;
  store_keys<C, kAgain>(dk, to, first, p.tile_keys);
  store_keys<C, kAgain>(dv, to + size, first, p.tile_keys);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) item_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  meet_item<C>(
      p, [] { return static_cast<int>(blockIdx.x); }, *reinterpret_cast<SharedMemory<C>*>(memory));
}

}  // namespace heddle::cuda::sm80::sparse_bwd

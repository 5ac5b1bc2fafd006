// Rows of q gathered for a block of keys: of each pair's rows the output over that block alone, normalised, and its
// lse.
#pragma once

#include <cfloat>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/sparse_fwd/params.h"

namespace heddle::cuda::sm80::sparse_fwd {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kTileKeys = 64, kTileRows = 16;

template <class T, int kHead>
struct SharedMemory {
  attention::Tile<T, kTileKeys, kHead> k, v;
  int pair[kItemRows];
  std::int64_t row[kItemRows];  // a pair's first row in its sequence
  Sequence s;
  std::int64_t b, block, unit;
};

// Keys [first, first + count) of a head; zeros behind the last one and behind the head's size.
template <class Tile>
__device__ inline void load_keys(Tile& tile, const Params& p, const Operand& x, std::int64_t size, std::int64_t b,
                                 const Sequence& s, std::int64_t kv_head, std::int64_t first, int count) {
  const std::uint32_t to = ptx::shared_address(&tile);
  for (int n = static_cast<int>(threadIdx.x); n < kTileKeys * Tile::kChunks; n += kThreads) {
    const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
    const bool exists = row < count && first + row < s.sk && chunk * Tile::kPerChunk < size;
    const std::byte* const from = exists ? x.at(b, s.k_begin + first + row, kv_head) + 16 * chunk : x.data;
    ptx::copy_async_16(to + attention::swizzled(Tile::kPitch, row, chunk), from, exists);
  }
}

// A warp's 16 rows.
template <class T, int kHead>
struct RowTile {
  std::uint32_t q[kHead / 16][4];
  float o[kHead / 8][4];
  float max[2], sum[2];
  int begin[2], end[2];   // keys that the row meets, from the block's first one on
  std::int64_t place[2];  // of its statistics; -1: there is no such row
};

template <class T, int kHead>
__device__ inline void load_rows(RowTile<T, kHead>& tile, const Params& p, const SharedMemory<T, kHead>& shared,
                                 int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const SparseProblem& problem = p.problem;
  const std::int64_t block_begin = shared.block * problem.lists.block_size;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + lane / 4 + 8 * r, n = row / p.rows, within = row - n * p.rows;
    const std::int64_t i = n < count ? shared.row[n] + within / p.group : 0;
    const bool exists = n < count && i < shared.s.sq;
    tile.place[r] = exists ? std::int64_t{shared.pair[n]} * p.rows + within : -1;
    tile.begin[r] = tile.end[r] = 0;
    const std::byte* from = nullptr;
    if (exists) {
      const KeyRange keys = problem.band(shared.s).keys_of(i);
      const std::int64_t size = problem.lists.block_size;
      tile.begin[r] = static_cast<int>(clamped(keys.begin - block_begin, 0, size));
      tile.end[r] = static_cast<int>(clamped(keys.end - block_begin, 0, size));
      const std::int64_t head = shared.unit * p.group + within % p.group;
      from = problem.q.at(shared.b, shared.s.q_begin + i, head) + 4 * (lane % 4);
    }
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = exists && 16 * k + 8 * half < problem.D;
        tile.q[k][2 * half + r] = there ? *reinterpret_cast<const std::uint32_t*>(from + 32 * k + 16 * half) : 0;
      }
    }
    tile.max[r] = -INFINITY;
    tile.sum[r] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) tile.o[n][e] = 0.0f;
  }
}

// The online softmax over one tile of keys, from `first` of the block on.
template <class T, int kHead>
__device__ inline void attend_tile(RowTile<T, kHead>& tile, const Params& p, const SharedMemory<T, kHead>& shared,
                                   int first, int keys) {
  using Tile = attention::Tile<T, kTileKeys, kHead>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::uint32_t k_tile = ptx::shared_address(&shared.k), v_tile = ptx::shared_address(&shared.v);
  float s[kTileKeys / 8][4];
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
    if (8 * n < keys) {
#pragma unroll
      for (int k = 0; k < kHead / 32; ++k) {
        std::uint32_t b[4];  // two steps of 16 columns
        ptx::load_matrix_x4(b, k_tile + attention::swizzled(Tile::kPitch, 8 * n + lane % 8, 4 * k + lane / 8));
        ptx::mma_16816<T>(s[n], tile.q[2 * k], b[0], b[1]);
        ptx::mma_16816<T>(s[n], tile.q[2 * k + 1], b[2], b[3]);
      }
    }
  }
  const int column = 2 * (lane % 4);
  bool whole = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) whole = whole && tile.begin[r] <= first && tile.end[r] >= first + keys;
  whole = __all_sync(0xffffffff, whole);
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = first + 8 * n + column + e % 2, r = e / 2;
      const bool met = whole ? 8 * n < keys : key >= tile.begin[r] && key < tile.end[r] && 8 * n < keys;
      s[n][e] = met ? s[n][e] * p.scale_log2 : -INFINITY;
      top[r] = fmaxf(top[r], s[n][e]);
    }
  }
  float base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(tile.max[r], largest_of_quad(top[r]));
    base[r] = top[r] == -INFINITY ? 0.0f : top[r];
    const float keep = ptx::exp2_approx(tile.max[r] - base[r]);
    tile.max[r] = top[r];
    tile.sum[r] *= keep;
    if (first > 0) {
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        tile.o[n][2 * r] *= keep;
        tile.o[n][2 * r + 1] *= keep;
      }
    }
  }
  unsigned met = 0;  // bit 2 n + e: some row of the warp meets this lane's column e of block n
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      met |= static_cast<unsigned>(s[n][e] != -INFINITY || s[n][2 + e] != -INFINITY) << (2 * n + e);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = ptx::exp2_approx(s[n][e] - base[e / 2]);
      tile.sum[e / 2] += s[n][e];
    }
  }
  met = any_of_quads(met);
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    if (16 * step < keys) {
      const std::uint32_t weights[4] = {
          ptx::pack2<T>(s[2 * step][0], s[2 * step][1]), ptx::pack2<T>(s[2 * step][2], s[2 * step][3]),
          ptx::pack2<T>(s[2 * step + 1][0], s[2 * step + 1][1]), ptx::pack2<T>(s[2 * step + 1][2], s[2 * step + 1][3])};
      // What no row meets may be anything, and zero times NaN is not zero.
      const std::uint32_t low = whole ? ~0u : halves(met >> (4 * step)),
                          high = whole ? ~0u : halves(met >> (4 * step + 2));
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n) {
        std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
        ptx::load_matrix_x4_transposed(
            v, v_tile + attention::swizzled(Tile::kPitch, 16 * step + lane % 16, 2 * n + lane / 16));
        ptx::mma_16816<T>(tile.o[2 * n], weights, v[0] & low, v[1] & high);
        ptx::mma_16816<T>(tile.o[2 * n + 1], weights, v[2] & low, v[3] & high);
      }
    }
  }
}

// Each row's halves in pieces of 16 bytes: piece i of lane c of a quad has columns 32 i + 8 t + 2 c and the next, for t
// from 0 to 3.
template <class T, int kHead>
__device__ inline void store_rows(const RowTile<T, kHead>& tile, const Params& p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_quad(tile.sum[r]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n) {
      largest = fmaxf(largest, fmaxf(fabsf(tile.o[n][2 * r]), fabsf(tile.o[n][2 * r + 1])));
    }
    largest = largest_of_quad(largest) * inverse;
    // Relative to the largest, so that halves hold any row; what is not finite stays so by itself.
    const bool finite = largest >= FLT_MIN && largest < INFINITY;
    const float factor = finite ? inverse / largest : inverse;
    if (tile.place[r] < 0) continue;
    if (lane % 4 == 0) {
      p.statistics[tile.place[r]] = {sum == 0.0f ? -INFINITY : tile.max[r] * kLn2 + __logf(sum),
                                     finite ? largest : 1.0f};
    }
    if (sum == 0.0f) continue;
    uint4* const to = reinterpret_cast<uint4*>(p.partial + tile.place[r] * kHead) + lane % 4;
#pragma unroll
    for (int i = 0; i < kHead / 32; ++i) {
      std::uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        words[t] = ptx::pack2<__half>(tile.o[4 * i + t][2 * r] * factor, tile.o[4 * i + t][2 * r + 1] * factor);
      }
      to[4 * i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <class T, int kHead>
__global__ void __launch_bounds__(kThreads) partial_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<T, kHead>*>(memory);
  if (static_cast<int>(blockIdx.x) >= *p.items_there) return;
  const Item item = p.items[blockIdx.x];
  const SparseProblem& problem = p.problem;
  for (int n = static_cast<int>(threadIdx.x); n < item.count; n += kThreads) {
    const int pair = p.order[item.first + n];
    const std::int64_t at = pair / p.slots;
    const Params::Place w = p.place(p.first + at / p.units);
    shared.pair[n] = pair;
    shared.row[n] = w.row;
    if (n == 0) {
      shared.unit = at % p.units;
      shared.b = w.b;
      shared.s = w.s;
      shared.block = item.block - shared.unit * p.blocks - p.first_block(w.b, w.s);
    }
  }
  __syncthreads();
  const std::int64_t kv_head = p.units == problem.Hkv ? shared.unit : shared.unit / problem.G;
  const int size = static_cast<int>(problem.lists.block_size), rows = item.count * p.rows;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  // A block of one tile is loaded once for all rows; one of more tiles goes by for each round of the warps.
  for (int first_row = 0; first_row < rows; first_row += kWarps * kTileRows) {
    const int first = first_row + warp * kTileRows;
    RowTile<T, kHead> tile;
    load_rows(tile, p, shared, first, item.count);
#pragma unroll 1
    for (int key = 0; key < size; key += kTileKeys) {
      const int keys = min(size - key, kTileKeys);
      if (first_row == 0 || size > kTileKeys) {
        __syncthreads();  // all warps have read the tile before
        const std::int64_t from = shared.block * size + key;
        load_keys(shared.k, p, problem.k, problem.D, shared.b, shared.s, kv_head, from, keys);
        load_keys(shared.v, p, problem.v, problem.Dv, shared.b, shared.s, kv_head, from, keys);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        __syncthreads();
      }
      if (first < rows) attend_tile(tile, p, shared, key, keys);
    }
    if (first < rows) store_rows(tile, p);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

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
constexpr int kStepKeys = 32;  // whose scores a warp has in registers

template <class T, int kHead>
struct SharedMemory {
  attention::Tile<T, kTileKeys, kHead> k, v;
  Named named[kItemRows];
  Item item;
  Sequence s;
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
  unsigned keys[2];  // that the row meets, from the block's first one on: their begin, and from bit 16 on their end
  int first;         // of the item's rows
};

template <class T, int kHead>
__device__ inline void load_rows(RowTile<T, kHead>& tile, const Params& p, const SharedMemory<T, kHead>& shared,
                                 int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const SparseProblem& problem = p.problem;
  tile.first = first;
  const std::int64_t block_begin = shared.item.block * problem.lists.block_size;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + lane / 4 + 8 * r, n = row / p.rows, within = row - n * p.rows;
    const std::int64_t i = n < count ? shared.named[n].row + within / p.group : 0;
    const bool exists = n < count && i < shared.s.sq;
    tile.keys[r] = 0;
    const std::byte* from = nullptr;
    if (exists) {
      const KeyRange keys = p.band(shared.s).keys_of(i);
      const std::int64_t size = problem.lists.block_size;
      tile.keys[r] = static_cast<unsigned>(clamped(keys.begin - block_begin, 0, size)) |
                     static_cast<unsigned>(clamped(keys.end - block_begin, 0, size)) << 16;
      const std::int64_t head = shared.named[n].head + within % p.group;
      from = problem.q.at(shared.item.b, shared.s.q_begin + i, head) + 4 * (lane % 4);
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

// The online softmax over `keys` keys, from `offset` of the tile and `first` of the block on.
template <class T, int kHead>
__device__ __forceinline__ void attend_step(RowTile<T, kHead>& tile, const Params& p,
                                            const SharedMemory<T, kHead>& shared, int offset, int first, int keys) {
  using Tile = attention::Tile<T, kTileKeys, kHead>;
  const int lane = static_cast<int>(attention::recomputed(threadIdx.x % kWarp, offset));
  const std::uint32_t k_tile = ptx::shared_address(&shared.k), v_tile = ptx::shared_address(&shared.v);
  float s[kStepKeys / 8][4];
#pragma unroll
  for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
    if (8 * n < keys) {
#pragma unroll
      for (int k = 0; k < kHead / 32; ++k) {
        std::uint32_t b[4];  // two steps of 16 columns
        ptx::load_matrix_x4(b, k_tile + attention::swizzled(Tile::kPitch, offset + 8 * n + lane % 8, 4 * k + lane / 8));
        ptx::mma_16816<T>(s[n], tile.q[2 * k], b[0], b[1]);
        ptx::mma_16816<T>(s[n], tile.q[2 * k + 1], b[2], b[3]);
      }
    }
  }
  const int begin[2] = {static_cast<int>(tile.keys[0] & 0xffff), static_cast<int>(tile.keys[1] & 0xffff)};
  const int end[2] = {static_cast<int>(tile.keys[0] >> 16), static_cast<int>(tile.keys[1] >> 16)};
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = first + 8 * n + 2 * (lane % 4) + e % 2, r = e / 2;
      const bool met = 8 * n < keys && key >= begin[r] && key < end[r];
      s[n][e] = met ? s[n][e] * p.scale_log2 : -INFINITY;
      top[r] = fmaxf(top[r], s[n][e]);
    }
  }
  float base[2], keep[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = largest_of_quad(top[r]);
    const float before = tile.max[r];
    if (top[r] > before + kRescaleLog2) tile.max[r] = top[r];
    base[r] = tile.max[r] == -INFINITY ? 0.0f : tile.max[r];
    keep[r] = ptx::exp2_approx(before - base[r]);
  }
  // Also of the first keys, where sums are zero: it costs next to nothing.
  if (__any_sync(0xffffffff, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile.sum[r] *= keep[r];
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n) {
        tile.o[n][2 * r] *= keep[r];
        tile.o[n][2 * r + 1] *= keep[r];
      }
    }
  }
  unsigned met = 0;  // bit 2 n + e: some row of the warp meets this lane's column e of block n
#pragma unroll
  for (int n = 0; n < kStepKeys / 8; ++n) {
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
  for (int step = 0; step < kStepKeys / 16; ++step) {
    if (16 * step < keys) {
      const std::uint32_t weights[4] = {
          ptx::pack2<T>(s[2 * step][0], s[2 * step][1]), ptx::pack2<T>(s[2 * step][2], s[2 * step][3]),
          ptx::pack2<T>(s[2 * step + 1][0], s[2 * step + 1][1]), ptx::pack2<T>(s[2 * step + 1][2], s[2 * step + 1][3])};
      // What no row meets may be anything, and zero times NaN is not zero.
      const std::uint32_t low = halves(met >> (4 * step)), high = halves(met >> (4 * step + 2));
#pragma unroll
      for (int n = 0; n < kHead / 16; ++n) {
        std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
        ptx::load_matrix_x4_transposed(
            v, v_tile + attention::swizzled(Tile::kPitch, offset + 16 * step + lane % 16, 2 * n + lane / 16));
        ptx::mma_16816<T>(tile.o[2 * n], weights, v[0] & low, v[1] & high);
        ptx::mma_16816<T>(tile.o[2 * n + 1], weights, v[2] & low, v[3] & high);
      }
    }
  }
}

// Each row's halves in pieces of 16 bytes: piece i of lane c of a quad has columns 32 i + 8 t + 2 c and the next, for t
// from 0 to 3.
template <class T, int kHead>
__device__ inline void store_rows(const RowTile<T, kHead>& tile, const Params& p,
                                  const SharedMemory<T, kHead>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_quad(tile.sum[r]), inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n) {
      largest = fmaxf(largest, fmaxf(fabsf(tile.o[n][2 * r]), fabsf(tile.o[n][2 * r + 1])));
    }
    largest = largest_of_quad(largest) * inverse;
    // Relative to the largest, so that halves hold any row; what is not finite stays so by itself.
    const bool finite = largest >= FLT_MIN && largest < INFINITY;
    const float factor = finite ? inverse / largest : inverse;
    const int row = tile.first + lane / 4 + 8 * r, n = row / p.rows, within = row - n * p.rows;
    if (n >= shared.item.count || shared.named[n].row + within / p.group >= shared.s.sq) continue;
    const std::int64_t place = std::int64_t{shared.named[n].pair} * p.rows + within;
    if (lane % 4 == 0) {
      p.statistics[place] = {sum == 0.0f ? -INFINITY : tile.max[r] * kLn2 + __logf(sum), finite ? largest : 1.0f};
    }
    if (sum == 0.0f) continue;
    uint4* const to = reinterpret_cast<uint4*>(p.partial + place * kHead) + lane % 4;
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
__global__ void __launch_bounds__(kThreads, 3) partial_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<T, kHead>*>(memory);
  if (static_cast<int>(blockIdx.x) >= *p.items_there) return;
  const SparseProblem& problem = p.problem;
  if (threadIdx.x == 0) {
    shared.item = p.items[blockIdx.x];
    shared.s = problem.sequence(shared.item.b);
  }
  __syncthreads();
  const int count = shared.item.count, rows = count * p.rows;
  const std::int64_t kv_head = shared.item.kv_head;
  const int size = static_cast<int>(problem.lists.block_size), warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto load = [&](int key) {
    const std::int64_t from = std::int64_t{shared.item.block} * size + key;
    const int keys = min(size - key, kTileKeys);
    load_keys(shared.k, p, problem.k, problem.D, shared.item.b, shared.s, kv_head, from, keys);
    load_keys(shared.v, p, problem.v, problem.Dv, shared.item.b, shared.s, kv_head, from, keys);
    ptx::copy_async_commit();
  };
  load(0);  // on its way while rows are found
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kThreads)
    shared.named[n] = p.named[shared.item.first + n];
  __syncthreads();
  // A block of one tile is loaded once for all rows; one of more tiles goes by for each round of the warps.
#pragma unroll 1
  for (int first_row = 0; first_row < rows; first_row += kWarps * kTileRows) {
    const int first = first_row + warp * kTileRows;
    RowTile<T, kHead> tile;
    load_rows(tile, p, shared, first, count);
#pragma unroll 1
    for (int key = 0; key < size; key += kTileKeys) {
      const bool begins = first_row == 0 && key == 0;
      if (begins || size > kTileKeys) {
        if (!begins) {
          __syncthreads();  // all warps have read the tile before
          load(key);
        }
        ptx::copy_async_wait<0>();
        __syncthreads();
      }
      const int keys = min(size - key, kTileKeys);
#pragma unroll 1
      for (int offset = 0; offset < keys && first < rows; offset += kStepKeys) {
        attend_step(tile, p, shared, offset, key + offset, min(keys - offset, kStepKeys));
      }
    }
    if (first < rows) store_rows(tile, p, shared);
  }
}

}  // namespace heddle::cuda::sm80::sparse_fwd

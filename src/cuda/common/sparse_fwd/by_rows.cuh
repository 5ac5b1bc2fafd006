// A tile of the rows that share a list goes through the list's blocks with an online softmax: for lists of many rows,
// and for calls of few. A list's blocks may be split among CTAs, whose results combine_kernel() joins.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/sparse_fwd/by_rows_keys.cuh"
#include "cuda/common/sparse_fwd/online.cuh"
#include "cuda/common/sparse_fwd/rows_out.cuh"
#include "cuda/common/wgmma.cuh"

namespace heddle::cuda::sparse_fwd::by_rows {

// A warp's 16 rows: q, and O and the softmax's statistics over the keys so far.
template <class C>
struct Rows {
  using T = typename C::Element;
  using Keys = typename SharedMemory<C>::Keys;
  std::uint32_t q[C::kHeadSize / 16][4];
  float o[C::kHeadSize / 8][4] = {};
  RowState state;

  // The tile's first row of this warp.
  __device__ static int first_row() { return C::kShare == 1 ? static_cast<int>(threadIdx.x) / kWarp * kGroupRows : 0; }

  __device__ explicit Rows(const Keys& q_tile) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::uint32_t from = ptx::shared_address(&q_tile);
#pragma unroll
    for (int k = 0; k < C::kHeadSize / 16; ++k) {
      ptx::load_matrix_x4(q[k], from + Keys::offset(first_row() + lane % 16, 2 * k + lane / 16));
    }
  }

  // Scores of the tile of keys from number `first` on, to weights; O and the statistics follow the new maximum. done:
  // called when the keys have been read.
  template <class Done>
  __device__ __forceinline__ void meet_keys(const Params& p, const SharedMemory<C>& shared, int first, const Keys& k,
                                            Done done) {
    const unsigned lane = threadIdx.x % kWarp;
    float s[1][C::kBlocks][4] = {};
    if constexpr (C::kWgmma) {
      auto& sums = reinterpret_cast<float(&)[C::kTileK / 2]>(s);
      const Swizzled128 keys(&k);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
        Wgmma<T, C::kTileK>::template registers_shared<false>(
            sums, q[step], keys.at(step / 4 * Keys::kPanelBytes + step % 4 * 32), step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(sums);
    } else {
      const std::uint32_t k_at = ptx::shared_address(&k) + Keys::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
#pragma unroll
        for (int n = 0; n < C::kBlocks / 2; ++n) {
          std::uint32_t y[4];
          ptx::load_matrix_x4(y, (k_at ^ step % 4 << 5) + step / 4 * Keys::kPanelBytes + n * 16 * Keys::kRowBytes);
          ptx::mma_16816<T>(s[0][2 * n], q[step], y[0], y[1]);
          ptx::mma_16816<T>(s[0][2 * n + 1], q[step], y[2], y[3]);
        }
      }
    }
    done();
    const float scale = positive_scale(s, p.scale_log2);
    whole = TilePositions(p, shared, first).within(shared.work.each);
    if (!whole) {
      const Interval<int>* const keys = shared.keys + first_row() + lane / 4;
      const Interval<int> met[2] = {keys[0], keys[8]};
#pragma unroll
      for (int n = 0; n < C::kBlocks; ++n) {
        const int position = position_of(p, shared, first + 8 * n + 2 * static_cast<int>(lane % 4));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (position + e % 2 < met[e / 2].begin || position + e % 2 >= met[e / 2].end) s[0][n][e] = -INFINITY;
        }
      }
      attended = attended_keys(s);
    }
    weigh<T>(s, scale, state, o, weights);
  }

  __device__ __forceinline__ void meet_values(const Keys& v) {
    if (!whole) {
      add_values<T, false>(o, weights, attended, v);
    } else if constexpr (C::kWgmma) {
      add_values_by_wgmma(v);
    } else {
      add_values<T, true>(o, weights, attended, v);
    }
  }

 private:
  std::uint32_t weights[C::kTileK / 16][4];
  bool whole;              // each row meets all keys of the tile
  std::uint32_t attended;  // where not: as attended_keys() has it

  __device__ __forceinline__ void add_values_by_wgmma(const Keys& v) {
    auto& sums = reinterpret_cast<float(&)[C::kHeadSize / 2]>(o);
    const Swizzled128 values(&v, Keys::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      Wgmma<T, C::kHeadSize>::template registers_shared<true>(sums, weights[step],
                                                              values.at(step * 16 * Keys::kRowBytes), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(sums);
  }
};

// Where a row's output goes: to o, or, a CTA having some of the list's blocks only, to partial results.
template <class C>
struct Destination {
  const Params& p;
  const Work& w;
  std::int64_t i, h, at;  // at: among partial results
  bool there;
  float factor, lse;  // of O; of all keys, and the sink

  // top, sum: of the keys met, in log2 units and relative to it.
  __device__ Destination(const Params& params, const Work& work, int row, float top, float sum) : p(params), w(work) {
    const int within = w.first + row, of_list = p.by_group.quotient(within);
    i = w.at.row + of_list;
    h = w.unit * p.group + (within - of_list * p.group);
    at = (static_cast<std::int64_t>(w.list * p.units + w.unit) * p.parts + w.split) * p.rows + within;
    there = row < w.rows && i < w.at.s.q_rows;
    // A row that is stored and not used was multiplied with the others: it meets no key.
    const bool used = there && i < w.at.s.sq;
    if (!used) sum = 0.0f;
    factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    lse = sum == 0.0f ? -INFINITY : top * kLn2 + __logf(sum);
    if (p.parts == 1 && used) {
      if (const float sink = sink_of(p, h); sink != -INFINITY) {
        const float base = fmaxf(lse, sink), weight = exp_of_difference(lse, base),
                    total = weight + exp_of_difference(sink, base);
        factor = factor == 0.0f ? 0.0f : factor * weight / total;
        lse = base + __logf(total);
      }
    }
  }
  // The quad that has the row's 32 columns.
  __device__ __forceinline__ void write(int piece, float (&o)[8]) const {
    float largest = 0.0f;
#pragma unroll
    for (float& x : o) {
      x = factor == 0.0f ? 0.0f : x * factor;
      largest = fmaxf(largest, fabsf(x));
    }
    if (p.parts == 1) {
      if (there) write_piece<typename C::Element>(p, w.at.b, w.at.s, i, h, piece, o);
    } else {
      largest = largest_of_quad(largest);
      const float unit = unit_of(largest < INFINITY ? largest : 1.0f);
      if (there) write_partial<C::kHeadSize>(p, at, piece, o, __fdividef(1.0f, unit), unit);
    }
  }
  __device__ __forceinline__ void write_statistics() const {
    if (!there) return;
    if (p.parts == 1) {
      write_lse(p, w.at.b, w.at.s, i, h, lse);
    } else {
      p.lse[at] = lse;
    }
  }
};

// The CTA's share of the tiles of keys of the blocks that are in shared memory.
template <class C>
__device__ __forceinline__ Interval<int> tiles_of_cta(const Params& p, const SharedMemory<C>& shared) {
  const int tiles = ((shared.count << p.block_log2) + kTileKeys - 1) / kTileKeys;
  const int each = (tiles + p.parts - 1) / p.parts, begin = min(shared.work.split * each, tiles);
  return {begin, min(begin + each, tiles)};
}

// Whether the list had more blocks, which then are in shared memory in the place of those before. All threads.
template <class C>
__device__ __forceinline__ bool has_next_blocks(const Params& p, SharedMemory<C>& shared) {
  if constexpr (C::kCsr) {
    if (!shared.progress.more) return false;
    __syncthreads();  // all have asked, and are done with the blocks and their keys
    if (threadIdx.x < kWarp) find_next_blocks(p, shared);
    __syncthreads();
    return true;
  }
  return false;
}

template <class C>
__global__ void __launch_bounds__(kThreads, C::kCtas) rows_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  using Keys = typename SharedMemory<C>::Keys;
  const SparseProblem& problem = p.problem;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == 0) shared.work = work_of<C>(p);
  __syncthreads();
  const Work& w = shared.work;
  if (!w.at.there) return;
  if constexpr (C::kCsr) {
    for (int n = thread; n < kMostBlocksByRows / 32; n += kThreads) shared.progress.named[n] = 0;
    if (thread == 0) shared.progress.next = 0;
    __syncthreads();
  }
  if (warp == 0) {
    if constexpr (C::kCsr) {
      find_next_blocks(p, shared);
    } else {
      find_blocks(p, shared);
    }
  } else if (const int row = thread - kWarp; row < C::kTileRows) {
    const int within = w.first + row, of_list = p.by_group.quotient(within);
    const std::int64_t i = w.at.row + of_list;
    const bool exists = row < w.rows && i < w.at.s.sq;
    const KeyRange keys = exists ? w.band.keys_of(i) : KeyRange{};
    shared.keys[row] = {static_cast<int>(keys.begin), static_cast<int>(keys.end)};
    // One that is not there meets no key and is not written: any will do.
    shared.q[row] = exists ? problem.q.at(w.at.b, w.at.s.q_begin + i, w.unit * p.group + (within - of_list * p.group))
                           : problem.q.data;
  }
  __syncthreads();
  Interval<int> tiles = tiles_of_cta(p, shared);
  // q lies first where a tile comes that is not among the first.
  Keys& q_tile = C::kShare == 1 ? shared.tiles[(tiles.begin + 1) % 2].k : shared.tiles[0].v;
#pragma unroll 4
  for (int n = thread; n < C::kTileRows * Keys::kChunks; n += kThreads) {
    const int row = n / Keys::kChunks, chunk = n % Keys::kChunks;
    const bool exists = chunk * Keys::kPerChunk < problem.D;
    ptx::copy_async_16(ptx::shared_address(&q_tile) + Keys::offset(row, chunk),
                       shared.q[row] + (exists ? 16 * chunk : 0), exists);
  }
  ptx::copy_async_commit();
  const Loader<C> load_k(p, problem.k, w, problem.D), load_v(p, problem.v, w, problem.Dv);
  const auto next_tiles = [&] {
    if (!has_next_blocks(p, shared)) return false;
    tiles = tiles_of_cta(p, shared);
    return true;
  };
  if constexpr (C::kShare == 1) {
    const auto load = [&](int tile) {
      const TilePositions positions(p, shared, tile * kTileKeys);
      load_k(p, shared, problem.k, tile * kTileKeys, positions, w.met, shared.tiles[tile % 2].k);
      load_v(p, shared, problem.v, tile * kTileKeys, positions, w.met, shared.tiles[tile % 2].v);
    };
    // Of lists by offsets a step of its own loads the first tile: for a second place that loads there are no registers.
    if constexpr (C::kCsr) {
      ptx::copy_async_wait<0>();
    } else {
      if (!tiles.empty()) load(tiles.begin);
      ptx::copy_async_commit();
      ptx::copy_async_wait<1>();
    }
    __syncthreads();  // q is there
    Rows<C> rows(q_tile);
    do {
#pragma unroll 1
      for (int tile = C::kCsr ? tiles.begin - 1 : tiles.begin; tile < tiles.end; ++tile) {
        ptx::copy_async_wait<0>();
        if constexpr (C::kWgmma) ptx::fence_async_shared();
        __syncthreads();  // the tile is there, and all are done with the one that the next takes the place of
        if (tile + 1 < tiles.end) load(tile + 1);
        ptx::copy_async_commit();
        if (C::kCsr && tile < tiles.begin) continue;
        rows.meet_keys(p, shared, tile * kTileKeys, shared.tiles[tile % 2].k, [] {});
        rows.meet_values(shared.tiles[tile % 2].v);
      }
    } while (next_tiles());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Destination<C> to(p, w, Rows<C>::first_row() + lane / 4 + 8 * r, rows.state.max[r],
                              sum_of_quad(rows.state.sum[r]));
#pragma unroll
      for (int m = 0; m < C::kHeadSize / 32; ++m) {
        float o[8];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          o[2 * t] = rows.o[4 * m + t][2 * r];
          o[2 * t + 1] = rows.o[4 * m + t][2 * r + 1];
        }
        to.write(4 * m + lane % 4, o);
      }
      if (lane % 4 == 0) to.write_statistics();
    }
  } else {
    auto& tile_of = shared.tiles[warp];
    const auto load = [&](const Loader<C>& loader, const Operand& x, int tile, Keys& to) {
      loader(p, shared, x, tile * kTileKeys, TilePositions(p, shared, tile * kTileKeys), w.met, to);
    };
    int tile = tiles.begin + warp;
    if (tile < tiles.end) load(load_k, problem.k, tile, tile_of.k);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    __syncthreads();  // q is there
    Rows<C> rows(q_tile);
    __syncthreads();  // it has been read, and values take its place
    if (tile < tiles.end) load(load_v, problem.v, tile, tile_of.v);
    ptx::copy_async_commit();
    while (true) {
#pragma unroll 1
      for (; tile < tiles.end; tile += C::kShare) {
        const int next = tile + C::kShare;
        ptx::copy_async_wait<1>();
        __syncwarp();  // the keys are there
        rows.meet_keys(p, shared, tile * kTileKeys, tile_of.k, [&] {
          __syncwarp();  // they have been read
          if (next < tiles.end) load(load_k, problem.k, next, tile_of.k);
          ptx::copy_async_commit();
        });
        ptx::copy_async_wait<1>();
        __syncwarp();  // the values are there
        rows.meet_values(tile_of.v);
        __syncwarp();  // they have been read
        if (next < tiles.end) load(load_v, problem.v, next, tile_of.v);
        ptx::copy_async_commit();
      }
      if (!next_tiles()) break;
      tile = tiles.begin + warp;
      if (tile < tiles.end) load(load_k, problem.k, tile, tile_of.k);
      ptx::copy_async_commit();
      if (tile < tiles.end) load(load_v, problem.v, tile, tile_of.v);
      ptx::copy_async_commit();
    }
    ptx::copy_async_wait<0>();
    __syncwarp();
    // Each warp's O in the place of its keys and values, as fragments have it: [columns / 8][lane][4].
    float4* const mine = reinterpret_cast<float4*>(&tile_of);
#pragma unroll
    for (int n = 0; n < C::kHeadSize / 8; ++n) {
      mine[n * kWarp + lane] = make_float4(rows.o[n][0], rows.o[n][1], rows.o[n][2], rows.o[n][3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_quad(rows.state.sum[r]);
      if (lane % 4 == 0) {
        shared.top[warp][lane / 4 + 8 * r] = rows.state.max[r];
        shared.sum[warp][lane / 4 + 8 * r] = sum;
      }
    }
    __syncthreads();                           // all warps' results are there
    constexpr int kPieces = C::kHeadSize / 8;  // of a row
#pragma unroll 1
    for (int n = thread; n < C::kTileRows * kPieces; n += kThreads) {
      const int row = n / kPieces, piece = n % kPieces;
      float top = -INFINITY, sum = 0.0f, o[8] = {};
#pragma unroll
      for (int m = 0; m < C::kShare; ++m) top = fmaxf(top, shared.top[m][row]);
      const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
      for (int m = 0; m < C::kShare; ++m) {
        const float weight = ptx::exp2_approx(shared.top[m][row] - base);
        sum += shared.sum[m][row] * weight;
        const float* const from = reinterpret_cast<const float*>(&shared.tiles[m]);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          // Row and columns of a fragment, as mma has them.
          const int at = ((piece / 4 * 4 + t) * kWarp + row % 8 * 4 + piece % 4) * 4 + row / 8 * 2;
          o[2 * t] = fmaf(from[at], weight, o[2 * t]);
          o[2 * t + 1] = fmaf(from[at + 1], weight, o[2 * t + 1]);
        }
      }
      const Destination<C> to(p, w, row, top, sum);
      to.write(piece, o);
      if (piece == 0) to.write_statistics();
    }
  }
}

}  // namespace heddle::cuda::sparse_fwd::by_rows

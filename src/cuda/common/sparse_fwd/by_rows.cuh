// A tile of the rows that share a list goes through the list's blocks with an online softmax: for lists of many rows,
// and for calls of few. A list's blocks may be split among CTAs, whose results combine_kernel() joins.
#pragma once

#include <climits>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/sparse/host.h"
#include "cuda/common/sparse/tile.cuh"
#include "cuda/common/sparse_fwd/params.h"
#include "cuda/common/sparse_fwd/rows_out.cuh"
#include "cuda/common/wgmma.cuh"

namespace heddle::cuda::sparse_fwd::by_rows {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

// kShare: warps that have the same rows, and each its own of the key tiles. 1: each has rows of its own. kWgmma: then
// products by wgmma, where all rows meet all keys of a tile.
template <class T, int kHead, int kSharing, bool kHopper>
struct Config {
  using Element = T;
  static constexpr bool kWgmma = kHopper && kSharing == 1;
  static constexpr int kShare = kSharing, kTileRows = kWarps / kShare * kGroupRows;
  static constexpr int kTileK = kTileKeys, kGroups = 1, kBlocks = kTileK / 8, kHeadSize = kHead;
  static constexpr int kLoaders = kThreads / kShare;  // threads that load a tile of keys
};

struct Work {
  sparse::Index::Place at;
  Band band;
  int unit, kv_head, list, split;
  int first, rows;     // of the list's rows: the tile's
  Interval<int> met;   // keys that some of its rows meets
  Interval<int> each;  // and that each of them meets
};

template <class C>
struct SharedMemory {
  using Keys = sparse::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  struct {
    Keys k, v;
  } tiles[C::kShare == 1 ? 2 : C::kShare];  // of even and odd tiles, or of each warp
  int blocks[sparse::kMostSlots];
  int count;  // of blocks
  const std::byte* q[C::kTileRows];
  Interval<int> keys[C::kTileRows];  // that a row meets
  Work work;
  float top[C::kShare][C::kTileRows], sum[C::kShare][C::kTileRows];  // of each warp that has the same rows
};

template <class C>
__device__ inline Work work_of(const Params& p) {
  Work w;
  unsigned n = blockIdx.x;
  const auto take = [&](unsigned of) {
    const unsigned rest = n % of;
    n /= of;
    return static_cast<int>(rest);
  };
  // A head unit's lists one after the other: its keys stay in the L2 cache.
  w.split = take(static_cast<unsigned>(p.parts));
  w.first = take(static_cast<unsigned>(p.row_tiles)) * C::kTileRows;
  w.list = take(static_cast<unsigned>(p.count));
  w.unit = static_cast<int>(n);
  w.kv_head = w.unit / p.kv_units;
  w.at = p.place(w.list);
  w.band = p.band(w.at.s);
  w.rows = min(C::kTileRows, p.rows - w.first);
  const std::int64_t i = w.at.row + w.first / p.group, end = w.at.row + (w.first + w.rows - 1) / p.group + 1;
  const KeyRange met = w.at.there ? w.band.keys_of({i, end}) : KeyRange{};
  const KeyRange each = w.at.there ? w.band.keys_of_each({i, end}) : KeyRange{};
  w.met = {static_cast<int>(met.begin), static_cast<int>(met.end)};
  w.each = {static_cast<int>(each.begin), static_cast<int>(each.end)};
  return w;
}

// The blocks that the list names and its tile's rows meet, each once, in the list's order. The first warp.
template <class C>
__device__ inline void find_blocks(const Params& p, SharedMemory<C>& shared) {
  const Work& w = shared.work;
  const int lane = static_cast<int>(threadIdx.x);
  const auto named = p.problem.lists.list(p.problem, w.at.b, w.at.s, w.at.row, w.unit);
  const KeyRange met{w.met.begin, w.met.end};
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < static_cast<int>(named.size()); base += kWarp) {
    const int slot = base + lane;
    const int block = slot < static_cast<int>(named.size()) ? named[slot] : -1;
    bool says = p.meets(met, block);
    // Of lanes with the same block the first stays; one that says nothing has a number of its own.
    const unsigned same = __match_any_sync(sparse::kAll, says ? block : -1 - lane);
    says = says && (same & ((1u << lane) - 1)) == 0;
    for (int before = 0; before < count; ++before) says = says && shared.blocks[before] != block;
    const unsigned these = __ballot_sync(sparse::kAll, says);
    __syncwarp();  // all have read the blocks before
    if (says) shared.blocks[count + __popc(these & ((1u << lane) - 1))] = block;
    count += __popc(these);
    __syncwarp();
  }
  if (lane == 0) shared.count = count;
}

// Key number `key` of the list's, all blocks one behind the other: its position; far below 0 where there is none.
template <class C>
__device__ __forceinline__ int position_of(const Params& p, const SharedMemory<C>& shared, int key) {
  const int block = key >> p.block_log2, within = key & ((1 << p.block_log2) - 1);
  return block < shared.count ? (shared.blocks[block] << p.block_log2) + within : INT_MIN / 2;
}

// Positions of a tile of keys, from number `first` on: each 16 side by side, as no block is smaller.
struct TilePositions {
  int of[kTileKeys / 16];

  template <class C>
  __device__ __forceinline__ TilePositions(const Params& p, const SharedMemory<C>& shared, int first) {
    of[0] = position_of(p, shared, first);
    const bool one_block = 1 << p.block_log2 >= kTileKeys;
#pragma unroll
    for (int n = 1; n < kTileKeys / 16; ++n)
      of[n] = one_block ? of[0] + 16 * n : position_of(p, shared, first + 16 * n);
  }
  __device__ __forceinline__ bool within(Interval<int> range) const {
    bool all = true;
#pragma unroll
    for (const int position : of) all = all && position >= range.begin && position + 16 <= range.end;
    return all;
  }
};

// A thread's share of tiles of keys or of values: the same piece of every kPass-th row.
template <class C>
struct Loader {
  using Keys = typename SharedMemory<C>::Keys;
  static constexpr int kPass = C::kLoaders / Keys::kChunks;
  const std::byte* from;  // its piece, and first row of each 16, at position 0
  bool column;            // the piece lies within the head

  __device__ Loader(const Operand& x, const Work& w, std::int64_t size) {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders, chunk = thread % Keys::kChunks;
    column = chunk * Keys::kPerChunk < size;
    from = column ? x.at(w.at.b, w.at.s.k_begin + thread / Keys::kChunks, w.kv_head) + 16 * chunk : x.data;
  }
  // Zeros for keys that no row meets.
  __device__ __forceinline__ void operator()(const Operand& x, const TilePositions& positions, Interval<int> met,
                                             Keys& to) const {
    const std::int64_t pitch = x.stride_s * static_cast<std::int64_t>(sizeof(typename C::Element));
    if (column && positions.within(met)) {
      load(x, positions, pitch, to, [](int) { return true; });
    } else {
      load(x, positions, pitch, to,
           [&](int position) { return column && position >= met.begin && position < met.end; });
    }
  }

 private:
  template <class Exists>
  __device__ __forceinline__ void load(const Operand& x, const TilePositions& positions, std::int64_t pitch, Keys& to,
                                       Exists exists) const {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders;
    const int row = thread / Keys::kChunks, chunk = thread % Keys::kChunks;
    const std::uint32_t at = ptx::shared_address(&to);
#pragma unroll
    for (int group = 0; group < kTileKeys; group += 16) {
      const int position = positions.of[group / 16];
      const std::byte* source = from + position * pitch;
#pragma unroll
      for (int n = 0; n < 16; n += kPass) {
        const bool there = exists(position + n + row);
        ptx::copy_async_16(at + Keys::offset(static_cast<unsigned>(group + n + row), chunk), there ? source : x.data,
                           there);
        source += kPass * pitch;
      }
    }
  }
};

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
    float scale = p.scale_log2;
    if (scale <= 0.0f) {  // so that the largest is the one after scaling, and what is masked stays so
#pragma unroll
      for (auto& block : s[0]) {
#pragma unroll
        for (float& x : block) x *= scale;
      }
      scale = 1.0f;
    }
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
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int n = 0; n < C::kBlocks; ++n) top = fmaxf(top, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
      top = fmaxf(state.max[r], largest_of_quad(top) * scale);
      const float base = top == -INFINITY ? 0.0f : top;
      correction[r] = ptx::exp2_approx(state.max[r] - base);
      state.max[r] = top;
#pragma unroll
      for (int n = 0; n < C::kBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[0][n][2 * r + c];
          x = ptx::exp2_approx(fmaf(x, scale, -base));
          sum += x;
        }
      }
      state.sum[r] = state.sum[r] * correction[r] + sum;
    }
    if (__any_sync(sparse::kAll, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (auto& x : o) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= correction[e / 2];
      }
    }
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = s[0][2 * step + i / 2];
        weights[step][i] = ptx::pack2<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void meet_values(const Keys& v) {
    if (!whole) {
      add_values<false>(v);
    } else if constexpr (C::kWgmma) {
      add_values_by_wgmma(v);
    } else {
      add_values<true>(v);
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
  template <bool kWhole>
  __device__ __forceinline__ void add_values(const Keys& values) {
    const std::uint32_t v_at = ptx::shared_address(&values);
    const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      // What no row meets may be anything, and zero times NaN is not zero.
      const std::uint32_t low = kWhole ? 0 : halves(attended >> (4 * step)),
                          high = kWhole ? 0 : halves(attended >> (4 * step + 2));
#pragma unroll
      for (int n = 0; n < C::kHeadSize / 16; ++n) {
        std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8
        ptx::load_matrix_x4_transposed(v, v_at + Keys::offset(16 * step + lane % 16, 2 * n + lane / 16));
        if constexpr (!kWhole) {
          v[0] &= low, v[1] &= high;
          v[2] &= low, v[3] &= high;
        }
        ptx::mma_16816<T>(o[2 * n], weights[step], v[0], v[1]);
        ptx::mma_16816<T>(o[2 * n + 1], weights[step], v[2], v[3]);
      }
    }
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

template <class C>
__global__ void __launch_bounds__(kThreads, C::kShare == 1 ? 3 : 1) rows_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  using Keys = typename SharedMemory<C>::Keys;
  const SparseProblem& problem = p.problem;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == 0) shared.work = work_of<C>(p);
  __syncthreads();
  const Work& w = shared.work;
  if (!w.at.there) return;
  if (warp == 0) {
    find_blocks(p, shared);
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
  const int tiles = ((shared.count << p.block_log2) + kTileKeys - 1) / kTileKeys;
  const int each = (tiles + p.parts - 1) / p.parts, begin = min(w.split * each, tiles), end = min(begin + each, tiles);
  // q lies first where a tile comes that is not among the first.
  Keys& q_tile = C::kShare == 1 ? shared.tiles[(begin + 1) % 2].k : shared.tiles[0].v;
#pragma unroll 4
  for (int n = thread; n < C::kTileRows * Keys::kChunks; n += kThreads) {
    const int row = n / Keys::kChunks, chunk = n % Keys::kChunks;
    const bool exists = chunk * Keys::kPerChunk < problem.D;
    ptx::copy_async_16(ptx::shared_address(&q_tile) + Keys::offset(row, chunk),
                       shared.q[row] + (exists ? 16 * chunk : 0), exists);
  }
  ptx::copy_async_commit();
  const Loader<C> load_k(problem.k, w, problem.D), load_v(problem.v, w, problem.Dv);
  if constexpr (C::kShare == 1) {
    const auto load = [&](int tile) {
      const TilePositions positions(p, shared, tile * kTileKeys);
      load_k(problem.k, positions, w.met, shared.tiles[tile % 2].k);
      load_v(problem.v, positions, w.met, shared.tiles[tile % 2].v);
    };
    if (begin < end) load(begin);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    __syncthreads();  // q is there
    Rows<C> rows(q_tile);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      ptx::copy_async_wait<0>();
      if constexpr (C::kWgmma) ptx::fence_async_shared();
      __syncthreads();  // the tile is there, and all are done with the one that the next takes the place of
      if (tile + 1 < end) load(tile + 1);
      ptx::copy_async_commit();
      rows.meet_keys(p, shared, tile * kTileKeys, shared.tiles[tile % 2].k, [] {});
      rows.meet_values(shared.tiles[tile % 2].v);
    }
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
      loader(x, TilePositions(p, shared, tile * kTileKeys), w.met, to);
    };
    int tile = begin + warp;
    if (tile < end) load(load_k, problem.k, tile, tile_of.k);
    ptx::copy_async_commit();
    ptx::copy_async_wait<1>();
    __syncthreads();  // q is there
    Rows<C> rows(q_tile);
    __syncthreads();  // it has been read, and values take its place
    if (tile < end) load(load_v, problem.v, tile, tile_of.v);
    ptx::copy_async_commit();
#pragma unroll 1
    for (; tile < end; tile += C::kShare) {
      const int next = tile + C::kShare;
      ptx::copy_async_wait<1>();
      __syncwarp();  // the keys are there
      rows.meet_keys(p, shared, tile * kTileKeys, tile_of.k, [&] {
        __syncwarp();  // they have been read
        if (next < end) load(load_k, problem.k, next, tile_of.k);
        ptx::copy_async_commit();
      });
      ptx::copy_async_wait<1>();
      __syncwarp();  // the values are there
      rows.meet_values(tile_of.v);
      __syncwarp();  // they have been read
      if (next < end) load(load_v, problem.v, next, tile_of.v);
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

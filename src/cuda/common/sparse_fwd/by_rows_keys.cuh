// Forward by rows, the keys' side: what a CTA has to do, which blocks its list names, and their keys and values on
// their way to shared memory.
#pragma once

#include <climits>

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/sparse/host.h"
#include "cuda/common/sparse/tile.cuh"
#include "cuda/common/sparse_fwd/params.h"

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
  const std::byte* from;      // its piece, and first row of each 16, at position 0, or of page 0
  const std::int32_t* pages;  // of the sequence; null: its keys are side by side
  bool column;                // the piece lies within the head

  __device__ Loader(const Params& p, const Operand& x, const Work& w, std::int64_t size) {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders, chunk = thread % Keys::kChunks;
    const std::int32_t* const table = p.problem.page_table.data;
    pages = table == nullptr ? nullptr : table + w.at.b * p.problem.page_table_stride;
    column = chunk * Keys::kPerChunk < size;
    const int row = thread / Keys::kChunks;
    from = column ? x.at(pages == nullptr ? w.at.b : 0, (pages == nullptr ? w.at.s.k_begin : 0) + row, w.kv_head) +
                        16 * chunk
                  : x.data;
  }
  // From `from` to the row of a position, in elements.
  __device__ __forceinline__ std::int64_t row_at(const Params& p, const Operand& x, int position) const {
    if (pages == nullptr) return position * x.stride_s;
    if (position < 0) return 0;  // there is none
    const int page = p.by_page.quotient(position);
    return clamped(pages[page], 0, p.problem.k_batches - 1) * x.stride_b +
           (position - page * static_cast<int>(p.by_page.divisor)) * x.stride_s;
  }
  // Zeros for keys that no row meets.
  __device__ __forceinline__ void operator()(const Params& p, const Operand& x, const TilePositions& positions,
                                             Interval<int> met, Keys& to) const {
    const std::int64_t pitch = x.stride_s * static_cast<std::int64_t>(sizeof(typename C::Element));
    if (column && positions.within(met)) {
      load(p, x, positions, pitch, to, [](int) { return true; });
    } else {
      load(p, x, positions, pitch, to,
           [&](int position) { return column && position >= met.begin && position < met.end; });
    }
  }

 private:
  template <class Exists>
  __device__ __forceinline__ void load(const Params& p, const Operand& x, const TilePositions& positions,
                                       std::int64_t pitch, Keys& to, Exists exists) const {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders;
    const int row = thread / Keys::kChunks, chunk = thread % Keys::kChunks;
    const std::uint32_t at = ptx::shared_address(&to);
#pragma unroll
    for (int group = 0; group < kTileKeys; group += 16) {
      const int position = positions.of[group / 16];
      const std::byte* source = from + row_at(p, x, position) * static_cast<std::int64_t>(sizeof(typename C::Element));
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

}  // namespace heddle::cuda::sparse_fwd::by_rows

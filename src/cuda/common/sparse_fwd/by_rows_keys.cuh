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
// products by wgmma, where all rows meet all keys of a tile. kCsr: lists one behind the other, of any length, of which
// a CTA has kSlots blocks at a time.
template <class T, int kHead, int kSharing, bool kHopper, bool kByOffsets>
struct Config {
  using Element = T;
  static constexpr bool kCsr = kByOffsets;
  static constexpr int kSlots = kCsr ? kSlotsAtOnce : sparse::kMostSlots;
  static constexpr bool kWgmma = kHopper && kSharing == 1;
  static constexpr int kShare = kSharing, kTileRows = kWarps / kShare * kGroupRows;
  static constexpr int kTileK = kTileKeys, kGroups = 1, kBlocks = kTileK / 8, kHeadSize = kHead;
  static constexpr int kLoaders = kThreads / kShare;  // threads that load a tile of keys
  static constexpr int kCtas = kShare > 1 ? 1 : 3;
};

struct Work {
  sparse::Index::Place at;
  Band band;
  int unit, kv_head, list, split;
  int first, rows;     // of the list's rows: the tile's
  Interval<int> met;   // keys that some of its rows meets
  Interval<int> each;  // and that each of them meets
};

// How far a list has been read, and a bit for each block that it named so far.
template <bool kCsr>
struct Progress {};
template <>
struct Progress<true> {
  unsigned next;  // entry
  bool more;      // there is such a one
  std::uint32_t named[kMostBlocksByRows / 32];
};

template <class C>
struct SharedMemory {
  using Keys = sparse::Tile<typename C::Element, kTileKeys, C::kHeadSize>;
  struct {
    Keys k, v;
  } tiles[C::kShare == 1 ? 2 : C::kShare];  // of even and odd tiles, or of each warp
  int blocks[C::kSlots];
  int stored[C::kSlots];  // where each is among k's blocks: its number, or of keys in pages its place there
  int count;              // of blocks
  const std::byte* q[C::kTileRows];
  Interval<int> keys[C::kTileRows];  // that a row meets
  Work work;
  float top[C::kShare][C::kTileRows], sum[C::kShare][C::kTileRows];  // of each warp that has the same rows
  [[no_unique_address]] Progress<C::kCsr> progress;
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

// Pages hold whole blocks, and lie one behind the other.
__device__ inline int stored_block(const Params& p, const Work& w, int block) {
  const SparseProblem& problem = p.problem;
  if (problem.page_table.data == nullptr) return block;
  const int page = p.by_page.quotient(block), blocks = static_cast<int>(p.by_page.divisor);
  const std::int64_t at = problem.page_table.data[w.at.b * problem.page_table_stride + page];
  return static_cast<int>(clamped(at, 0, problem.k_batches - 1)) * blocks + block - page * blocks;
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
    if (says) {
      const int at = count + __popc(these & ((1u << lane) - 1));
      shared.blocks[at] = block;
      shared.stored[at] = stored_block(p, w, block);
    }
    count += __popc(these);
    __syncwarp();
  }
  if (lane == 0) shared.count = count;
}

// Of lists by offsets: the next blocks of the list, as many as there is room for, in time of the entries read. The
// first warp.
template <class C>
__device__ inline void find_next_blocks(const Params& p, SharedMemory<C>& shared) {
  const Work& w = shared.work;
  auto& progress = shared.progress;
  const int lane = static_cast<int>(threadIdx.x);
  const auto named = p.problem.lists.list(p.problem, w.at.b, w.at.s, w.at.row, w.unit);
  const auto length = static_cast<unsigned>(named.size());  // as offsets have 31 bits
  const KeyRange met{w.met.begin, w.met.end};
  unsigned next = progress.next;
  int count = 0;
#pragma unroll 1
  while (next < length && count < C::kSlots) {
    const unsigned slot = next + static_cast<unsigned>(lane);
    const int block = slot < length ? named[slot] : -1;
    bool says = p.meets(met, block);
    // Of lanes with the same block the first stays; one that says nothing has a number of its own.
    const unsigned same = __match_any_sync(sparse::kAll, says ? block : -1 - lane);
    says = says && (same & ((1u << lane) - 1)) == 0 && (progress.named[block / 32] >> block % 32 & 1) == 0;
    const unsigned these = __ballot_sync(sparse::kAll, says);
    const int at = count + __popc(these & ((1u << lane) - 1));
    const unsigned left = __ballot_sync(sparse::kAll, says && at >= C::kSlots);  // for the next time
    if (says && at < C::kSlots) {
      atomicOr(&progress.named[block / 32], 1u << block % 32);
      shared.blocks[at] = block;
      shared.stored[at] = stored_block(p, w, block);
    }
    count += __popc(these & ~left);
    next += left == 0 ? kWarp : static_cast<unsigned>(__ffs(static_cast<int>(left)) - 1);
    __syncwarp();  // the bits are there
  }
  if (lane == 0) {
    shared.count = count;
    progress.next = next;
    progress.more = next < length;
  }
}

// Key number `key` of the list's, all blocks one behind the other: its position; far below 0 where there is none.
template <class C>
__device__ __forceinline__ int position_of(const Params& p, const SharedMemory<C>& shared, int key) {
  const int block = key >> p.block_log2, within = key & ((1 << p.block_log2) - 1);
  return block < shared.count ? (shared.blocks[block] << p.block_log2) + within : INT_MIN / 2;
}

// Where that key is stored, as a position from the sequence's first key on, or in pages from k's.
template <class C>
__device__ __forceinline__ int stored_at(const Params& p, const SharedMemory<C>& shared, int key) {
  const int block = key >> p.block_log2, within = key & ((1 << p.block_log2) - 1);
  return block < shared.count ? (shared.stored[block] << p.block_log2) + within : 0;
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

  __device__ Loader(const Params& p, const Operand& x, const Work& w, std::int64_t size) {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders, chunk = thread % Keys::kChunks;
    column = chunk * Keys::kPerChunk < size;
    const std::int64_t batch = p.problem.page_table.data == nullptr ? w.at.b : 0;
    from = column ? x.at(batch, w.at.s.k_begin + thread / Keys::kChunks, w.kv_head) + 16 * chunk : x.data;
  }
  // The tile of keys from number `first` on. Zeros for keys that no row meets.
  __device__ __forceinline__ void operator()(const Params& p, const SharedMemory<C>& shared, const Operand& x,
                                             int first, const TilePositions& positions, Interval<int> met,
                                             Keys& to) const {
    const std::int64_t pitch = x.stride_s * static_cast<std::int64_t>(sizeof(typename C::Element));
    const auto stored = [&](int group) { return stored_at(p, shared, first + group); };
    if (column && positions.within(met)) {
      load(x, positions, pitch, to, stored, [](int) { return true; });
    } else {
      load(x, positions, pitch, to, stored,
           [&](int position) { return column && position >= met.begin && position < met.end; });
    }
  }

 private:
  template <class Stored, class Exists>
  __device__ __forceinline__ void load(const Operand& x, const TilePositions& positions, std::int64_t pitch, Keys& to,
                                       Stored stored, Exists exists) const {
    const int thread = static_cast<int>(threadIdx.x) % C::kLoaders;
    const int row = thread / Keys::kChunks, chunk = thread % Keys::kChunks;
    const std::uint32_t at = ptx::shared_address(&to);
#pragma unroll
    for (int group = 0; group < kTileKeys; group += 16) {
      const int position = positions.of[group / 16];
      const std::byte* source = from + stored(group) * pitch;
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

// From an item to tiles: which rows it has, and its keys on their way to shared memory. And from a pair to an item,
// where there is no index.
#pragma once

#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/sparse/params.h"

namespace heddle::cuda::sparse {

// A row of an item, and what it meets of a tile of the block's keys.
struct FoundRow {
  int place = -1;             // among partial results, [pairs, subs, rows]; -1: there is no such row
  unsigned keys = 0;          // of the tile: begin, and from bit 16 on the end
  std::int64_t i = 0, h = 0;  // position in the sequence, and head
};

// row: of the item's, count * p.rows. band: of its sequence. named: its pairs. sub: which tile of the block's keys.
__device__ inline FoundRow find_row(const Index& p, const Item& item, const Band& band, const Named* named, int row,
                                    int sub) {
  FoundRow found;
  const int n = p.by_rows.quotient(row), within = row - n * p.rows;
  if (n >= item.count) return found;
  const Named of = named[n];
  const int of_list = p.by_group.quotient(within);
  found.i = of.row + of_list;
  found.h = of.head + (within - of_list * p.group);
  if (found.i >= band.rows) return found;
  const std::int64_t first = item.block * p.problem.lists.block_size + sub * kTileKeys;
  Band constant = band;
  constant.key_step = 1;  // so that nothing is divided
  const KeyRange keys = constant.keys_of(found.i);
  found.keys = static_cast<unsigned>(clamped(keys.begin - first, 0, p.tile_keys)) |
               static_cast<unsigned>(clamped(keys.end - first, 0, p.tile_keys)) << 16;
  found.place = (of.pair * p.subs + sub) * p.rows + within;
  return found;
}

// threadIdx.x. kAgain: of a CTA that has one item after another, where what is computed from it outside the loop over
// items would have no registers while one is met.
template <bool kAgain>
__device__ __forceinline__ unsigned thread_of_item() {
  if constexpr (kAgain) return static_cast<unsigned>(recomputed(static_cast<int>(threadIdx.x)));
  return threadIdx.x;
}

// Those keys of a tile that any row of the sequence meets; zeros for the others, and behind a head's size.
template <int kThreads, bool kAgain, class Tile>
__device__ inline void load_keys(const Index& p, const Item& item, const Sequence& s, const Band& band, int sub,
                                 const Operand& x, std::int64_t size, Tile& tile) {
  constexpr int kPass = kThreads / Tile::kChunks;
  const std::int64_t first = item.block * p.problem.lists.block_size + sub * kTileKeys;
  const Interval<std::int64_t> met = band.keys_of(band.all_rows()).common({first, first + p.tile_keys});
  const int begin = static_cast<int>(met.begin - first), end = static_cast<int>(met.end - first);
  const int thread = static_cast<int>(thread_of_item<kAgain>());
  const int row0 = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
  const bool column = Tile::kPerChunk * chunk < size;
  const std::uint32_t to = ptx::shared_address(&tile);
  const AttentionProblem::Slot slot = p.problem.key_slot(item.b, s, first);  // a tile lies in one page
  const std::byte* from = x.at(slot.batch, slot.row + row0, item.kv_head) + 16 * chunk;
  const std::int64_t step = kPass * x.stride_s * static_cast<std::int64_t>(16 / Tile::kPerChunk);
#pragma unroll 4
  for (int row = row0; row < kTileKeys; row += kPass) {
    const bool exists = column && row >= begin && row < end;
    ptx::copy_async_16(to + Tile::offset(row, chunk), exists ? from : x.data, exists);
    from += step;
  }
}

}  // namespace heddle::cuda::sparse

// A warp has a list, and puts it in order by a bitmap in shared memory: what is named twice is there once, and the
// order is that of the bits. Lists the other way round are counted and filled by atomic additions, in whatever order
// these happen, and then put in order likewise.
#pragma once

#include "cuda/common/prefix_sum.cuh"
#include "cuda/common/sparse/place.h"
#include "problem/key_walk.h"
#include "problem/sparse.h"

namespace heddle::cuda::tile_lists {

constexpr int kThreads = 256, kWarps = kThreads / 32, kScanThreads = 1024;
constexpr int kWords = 128;  // of a warp's bitmap: longer ranges are gone through piece by piece

struct Params {
  SparseProblem problem;
  std::int64_t lists;  // of a head unit, over all sequences
  // Tiles of keys by lists of rows, ascending: [lists, units, entries of a list], and how many a list has.
  std::int32_t *tiles_of_rows, *counts_of_rows;
  int blocks_of_tile;
  // The other way round. The rest is for that only.
  std::int32_t* entries;   // of all tiles of keys, one behind the other
  std::int32_t* counts;    // [numbers]
  std::int32_t* places;    // TileLists::places, or null; by tiles_of_rows
  std::int64_t key_tiles;  // of a head unit, over all sequences
  std::int32_t* begins;    // [numbers], numbers = units * key_tiles: where a tile's list begins in `entries`
  std::int32_t* ends;      // [numbers]: behind the last of its entries in `named`, once it is full
  std::int32_t* named;     // list of rows in its sequence, times 2, and which half of the tile; in any order
  int keys_of_tile, rows_of_tile;
  int tiles_of_list, part_bits;

  constexpr std::int64_t numbers() const { return problem.lists.units * key_tiles; }
  // The number of the first list of a sequence, as place_of_tile() has it.
  constexpr std::int64_t first_list(std::int64_t b, const Sequence& s) const {
    const std::int64_t share = problem.lists.query_rows;
    return problem.cu_seqlens_q.given ? s.q_begin / share + b : b * ((problem.Sq + share - 1) / share);
  }
  // The number, within a head unit, of the first tile of keys of a sequence.
  constexpr std::int64_t first_tile(std::int64_t b, const Sequence& s) const {
    return problem.cu_seqlens_k.given ? s.k_begin / keys_of_tile + b
                                      : b * ((problem.Sk + keys_of_tile - 1) / keys_of_tile);
  }
};

// List n of a head unit, and the blocks that some of its rows meet. Others say nothing.
struct Listed {
  sparse::Place at;
  const std::int32_t* entries = nullptr;
  int length = 0;
  Interval<int> blocks;

  __device__ Listed(const SparseProblem& p, std::int64_t n, std::int64_t unit)
      : at(sparse::place_of_tile(p, n, p.lists.query_rows)) {
    if (!at.there) return;
    const Interval<std::int64_t> met =
        tiles_of(p.band(at.s).keys_of(Interval<std::int64_t>{at.row, at.row + p.lists.query_rows}), p.lists.block_size);
    blocks = {static_cast<int>(met.begin), static_cast<int>(met.end)};
    const auto list = p.lists.list(p, at.b, at.s, at.row, unit);
    entries = list.data();
    length = static_cast<int>(list.size());
  }
  __device__ bool names(int block) const { return block >= blocks.begin && block < blocks.end; }
};

// The number of this thread's warp in the grid.
__device__ inline std::int64_t warp_of_grid() { return (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; }

// Calls mark(bits, base, end) for pieces [base, end) of `range`, each with an empty bitmap of kBitmaps words of kWords;
// then write(base + bit, word of each bitmap shifted to it, place), for each bit that is in one of them, in ascending
// order: place counts what was written before, `width` for each bit. Returns what it comes to. The whole warp.
template <int kBitmaps, class Mark, class Write>
__device__ int in_order(std::uint32_t (&bits)[kBitmaps][kWords], const Interval<int>& range, int width,
                        const Mark& mark, const Write& write) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
#pragma unroll 1
  for (int base = range.begin; base < range.end; base += 32 * kWords) {
    const int end = min(range.end, base + 32 * kWords), words = (end - base + 31) / 32;
    for (int n = lane; n < words; n += 32) {
#pragma unroll
      for (auto& bitmap : bits) bitmap[n] = 0;
    }
    __syncwarp();
    mark(base, end);
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < words; first += 32) {
      std::uint32_t word[kBitmaps], any = 0;
#pragma unroll
      for (int n = 0; n < kBitmaps; ++n) {
        word[n] = first + lane < words ? bits[n][first + lane] : 0;
        any |= word[n];
      }
      const int mine = width * __popc(any), through = sum_through_lane(mine, lane);
      int place = count + through - mine;
#pragma unroll 1
      for (; any != 0; any &= any - 1, place += width) {
        const int bit = __ffs(static_cast<int>(any)) - 1;
        int parts = 0;
#pragma unroll
        for (int n = 0; n < kBitmaps; ++n) parts |= static_cast<int>(word[n] >> bit & 1) << n;
        write(base + 32 * (first + lane) + bit, parts, place);
      }
      count += __shfl_sync(0xffffffff, through, 31);
    }
    __syncwarp();  // all lanes have read the words
  }
  return count;
}

static __global__ void __launch_bounds__(kThreads) keys_of_rows_kernel(const __grid_constant__ Params p) {
  __shared__ std::uint32_t bits[kWarps][1][kWords];
  const std::int64_t number = warp_of_grid(), units = p.problem.lists.units;
  if (number >= p.lists * units) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto& mine = bits[threadIdx.x / 32];
  const Listed list(p.problem, number / units, number % units);
  std::int32_t* const to = p.tiles_of_rows + number * p.problem.lists.entries;
  const int count = in_order(
      mine, tiles_of(list.blocks, p.blocks_of_tile), 1,
      [&](int base, int end) {
#pragma unroll 1
        for (int slot = lane; slot < list.length; slot += 32) {
          const int block = list.entries[slot], tile = block / p.blocks_of_tile;
          if (list.names(block) && tile >= base && tile < end) {
            atomicOr(&mine[0][(tile - base) / 32], 1u << (tile - base) % 32);
          }
        }
      },
      [&](int tile, int, int place) { to[place] = tile; });
  if (lane == 0) p.counts_of_rows[number] = count;
}

// Calls take(number of the tile of keys, list in its sequence, half) for each entry that says something, also for one
// that is there twice. The whole warp.
template <class Take>
__device__ void for_each_named(const Params& p, const Take& take) {
  const std::int64_t number = warp_of_grid(), units = p.problem.lists.units;
  if (number >= p.lists * units) return;
  const std::int64_t unit = number % units, size = p.problem.lists.block_size;
  const Listed list(p.problem, number / units, unit);
  const int of_tile = p.keys_of_tile / static_cast<int>(size);
  const int row = static_cast<int>(list.at.row / p.problem.lists.query_rows);
  const std::int64_t first = unit * p.key_tiles + p.first_tile(list.at.b, list.at.s);
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x) % 32; slot < list.length; slot += 32) {
    const int block = list.entries[slot];
    if (list.names(block)) take(first + block / of_tile, row, block % of_tile);
  }
}

static __global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Params p) {
  for_each_named(p, [&](std::int64_t number, int, int) { atomicAdd(&p.counts[number], 1); });
}

// One CTA: where lists begin. `ends` begins there too, and moves as they fill.
static __global__ void __launch_bounds__(kScanThreads) scan_kernel(const __grid_constant__ Params p) {
  __shared__ int sums[kScanThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int before = 0;
#pragma unroll 1
  for (std::int64_t base = 0; base < p.numbers(); base += kScanThreads) {
    const std::int64_t number = base + thread;
    const int count = number < p.numbers() ? p.counts[number] : 0, through = sum_through_lane(count, lane);
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    if (warp == 0) sums[lane] = sum_through_lane(sums[lane], lane);
    __syncthreads();
    const int begin = before + through - count + (warp > 0 ? sums[warp - 1] : 0);
    if (number < p.numbers()) {
      p.ends[number] = begin;
      p.begins[number] = begin * p.tiles_of_list;
    }
    before += sums[kScanThreads / 32 - 1];
    __syncthreads();  // the sums have been read
  }
}

static __global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ Params p) {
  for_each_named(
      p, [&](std::int64_t number, int row, int half) { p.named[atomicAdd(&p.ends[number], 1)] = 2 * row + half; });
}

static __global__ void __launch_bounds__(kThreads) rows_of_keys_kernel(const __grid_constant__ Params p) {
  __shared__ std::uint32_t bits[kWarps][2][kWords];
  const std::int64_t number = warp_of_grid();
  if (number >= p.numbers()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, count = p.counts[number];
  const std::int32_t* const named = p.named + (p.ends[number] - count);
  std::int32_t* const to = p.entries + p.begins[number];
  auto& mine = bits[threadIdx.x / 32];
  const bool halves = p.problem.lists.block_size < p.keys_of_tile;
  const std::int64_t longest = p.problem.cu_seqlens_q.given ? p.problem.q_rows : p.problem.Sq;
  const int lists = static_cast<int>((longest + p.problem.lists.query_rows - 1) / p.problem.lists.query_rows);
  const int width = p.tiles_of_list;
  const int written = in_order(
      mine, {0, count > 0 ? lists : 0}, width,
      [&](int base, int end) {
#pragma unroll 1
        for (int n = lane; n < count; n += 32) {
          const int row = named[n] / 2, half = named[n] % 2;
          if (row >= base && row < end) atomicOr(&mine[half][(row - base) / 32], 1u << (row - base) % 32);
        }
      },
      [&](int row, int parts, int place) {
#pragma unroll 1
        for (int n = 0; n < width; ++n) to[place + n] = (row * width + n) << p.part_bits | (halves ? parts : 3);
      });
  if (lane == 0) p.counts[number] = written;
}

// After that: of each tile of rows that a tile of keys has, how many of the tiles of keys behind it have it, too. They
// come before it.
static __global__ void __launch_bounds__(kThreads) places_kernel(const __grid_constant__ Params p) {
  const std::int64_t number = warp_of_grid();
  if (number >= p.numbers()) return;
  const std::int64_t unit = number / p.key_tiles, column = number - unit * p.key_tiles;
  std::int64_t b = 0, high = p.problem.B;  // b begins there or before, `high` does not
  while (high - b > 1) {
    const std::int64_t middle = b + (high - b) / 2;
    (p.first_tile(middle, p.problem.stored_sequence(middle)) <= column ? b : high) = middle;
  }
  const Sequence s = p.problem.stored_sequence(b);
  const int tile = static_cast<int>(column - p.first_tile(b, s)), count = p.counts[number];
  const Band band = p.problem.band(s);
  const std::int64_t first_list = p.first_list(b, s);
#pragma unroll 1
  for (int n = p.begins[number] + static_cast<int>(threadIdx.x) % 32; n < p.begins[number] + count; n += 32) {
    const int row_tile = p.entries[n] >> p.part_bits;
    const std::int64_t list = (first_list + row_tile / p.tiles_of_list) * p.problem.lists.units + unit;
    const std::int64_t row = std::int64_t{row_tile} * p.rows_of_tile;
    const Interval<std::int64_t> met =
        tiles_of(band.keys_of(Interval<std::int64_t>{row, row + p.rows_of_tile}), std::int64_t{p.keys_of_tile});
    const std::int32_t* const tiles = p.tiles_of_rows + list * p.problem.lists.entries;
    const int of_list = p.counts_of_rows[list];
    p.places[n] = ListWalk<int>::below(tiles, of_list, static_cast<int>(met.end)) -
                  ListWalk<int>::below(tiles, of_list, tile + 1);
  }
}

}  // namespace heddle::cuda::tile_lists

// Which CTA computes what. Lengths are known here only, so that every CTA counts the cells of all sequences and takes
// its share: the same number of keys for each, whatever the lengths.
//
// `abreast` CTAs form a group that walks through the same cells together, each for a unit of its own: the heads of a
// key lie side by side in memory, and DRAM likes them to be read at about the same time.
#pragma once

#include "cuda/common/bounded_sequence.h"
#include "cuda/sm80/attention_decode/config.h"
#include "cuda/sm80/attention_decode/params.h"

namespace heddle::cuda::sm80::attention_decode {

// A sequence, with its keys by the slots in which they are stored: key j is slot first_slot + j of the cache row (or of
// the pages), or row first_slot + j of packed keys.
struct Extent {
  int q_row, q_rows, sq, sk, off, first_slot;
  int begin, end;          // slots of keys that any row attends, or that the call appends
  int new_begin, new_end;  // slots of appended keys
  int cells, cell_keys;
};

__device__ inline Extent extent_of(const Params& p, int b) {
  const AttentionProblem& a = p.problem;
  const Sequence s = bounded(a, a.sequence(b), a.batch_invariant);  // partial results
  Extent e;
  e.q_row = static_cast<int>(s.q_begin);
  e.q_rows = static_cast<int>(s.q_rows);
  e.sq = static_cast<int>(s.sq);
  e.sk = static_cast<int>(s.sk);
  e.off = row_band_off(s);
  e.first_slot = static_cast<int>(s.k_begin);
  const int begin = p.band.begin(e.off, 0), end = e.sq == 0 ? 0 : min(p.band.end(e.off, e.sq - 1), e.sk);
  e.begin = e.first_slot + min(begin, e.sk);
  e.end = max(e.begin, e.first_slot + end);
  e.new_begin = e.new_end = kOpen;
  if (a.append.k_new.data != nullptr) {
    e.new_begin = a.seqused_k[b];
    e.new_end = e.first_slot + e.sk;
    const int written = max(e.new_begin, 0);
    if (written < e.new_end) {
      e.begin = e.begin < e.end ? min(e.begin, written) : written;
      e.end = e.new_end;
    }
  }
  // Over a cache in 4 bits, cells begin where its blocks do.
  if (a.int4 && e.begin < e.end) e.begin -= e.begin % kCellKeys;
  const int keys = e.end - e.begin, least_keys = a.int4 ? kCellKeys : kStepKeys;
  e.cell_keys = kCellKeys;
  if (p.max_chunks > 0) {
    const int chunks = max(min((keys + kChunkKeys - 1) / kChunkKeys, kMaxChunks), 1);
    e.cell_keys = max((keys + chunks * least_keys - 1) / (chunks * least_keys), 1) * least_keys;
  }
  e.cells = max((keys + e.cell_keys - 1) / e.cell_keys, 1);
  return e;
}

// A run of cells of one unit: what a CTA computes in one go.
struct Segment {
  int b, head, tile;         // of kv heads; of packed rows
  int begin, end;            // slots
  bool whole;                // all of the unit; else there is
  std::int64_t slot;         // where its partial result goes,
  std::int64_t first, step;  // and those of the unit are: see slot_of()
  int count;
};

template <class C>
class Schedule {
 public:
  __device__ Schedule(const Params& params, SharedMemory<C>& shared)
      : p(params), blocks(p.units / p.abreast), group(blockIdx.x / p.abreast), member(blockIdx.x % p.abreast) {
    std::int64_t before = 0;
    if (p.uniform) {
      e = extent_of(p, 0);
      total = p.problem.B * blocks * e.cells;
      share();
      sequence = static_cast<int>(at / (std::int64_t{blocks} * e.cells));
      before = std::int64_t{sequence} * e.cells;
    } else {
      total = count_all(shared) * blocks;
      share();
      if (at < end) find(shared, sequence, before);
    }
    base = before * blocks;
    if (at < end) e = extent_of(p, sequence);
  }

  // The next segment of this CTA; false if there is none.
  __device__ bool next(Segment& s) {
    if (at >= end) return false;
    while (at >= base + std::int64_t{blocks} * e.cells) {
      base += std::int64_t{blocks} * e.cells;
      e = extent_of(p, ++sequence);
    }
    const auto from = static_cast<unsigned>(at - base);
    const int block = static_cast<int>(from / e.cells), cell = static_cast<int>(from - block * e.cells);
    const int unit = block * p.abreast + member;
    const int left = static_cast<int>(end - at < e.cells ? end - at : e.cells);
    const int cells = p.max_chunks > 0 ? 1 : min(e.cells - cell, left);
    s.b = sequence;
    s.head = unit / p.row_tiles;
    s.tile = unit - s.head * p.row_tiles;
    s.begin = e.begin + cell * e.cell_keys;
    s.end = min(s.begin + cells * e.cell_keys, e.end);
    s.whole = cells == e.cells;
    if (p.max_chunks > 0) {
      s.first = (std::int64_t{sequence} * p.units + unit) * p.max_chunks;
      s.slot = s.first + cell;
      s.step = 1;
      s.count = e.cells;
    } else if (!s.whole) {
      // Each CTA has two slots: for a unit that others began, and for one that others end.
      const int first = owner(at - cell), last = owner(at - cell + e.cells - 1);
      s.step = 2 * p.abreast;
      s.first = first * s.step + 2 * member + 1;
      s.slot = cell == 0 ? s.first : 2 * static_cast<int>(blockIdx.x);
      s.count = last - first + 1;
    }
    at += cells;
    return true;
  }

  // Slot number i of those of a unit: chunk i's, or that of the i-th CTA.
  __device__ static std::int64_t slot_of(const Segment& s, int i) {
    return s.first + i * s.step - (s.step > 1 && i > 0 ? 1 : 0);
  }

  Extent e;  // of the segment's sequence

 private:
  // Cells [at, end) of all are this group's.
  __device__ void share() {
    const std::int64_t worth = total / p.least_cells;
    const int all = static_cast<int>(gridDim.x) / p.abreast;
    groups = static_cast<int>(worth < 1 ? 1 : worth < all ? worth : all);
    at = group < groups ? begin_of(group) : 0;
    end = group < groups ? begin_of(group + 1) : 0;
  }
  __device__ std::int64_t begin_of(int group) const { return total * group / groups; }
  // The group whose share holds this cell.
  __device__ int owner(std::int64_t cell) const { return static_cast<int>(((cell + 1) * groups - 1) / total); }

  // Sum of `cells` over this thread and those before it; the block's by `sum`.
  __device__ static std::int64_t scan(SharedMemory<C>& shared, std::int64_t cells, std::int64_t& sum) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const std::int64_t before = __shfl_up_sync(0xffffffff, cells, lanes);
      if (lane >= lanes) cells += before;
    }
    __syncthreads();
    if (lane == 31) shared.sums[warp] = cells;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < C::kWarps; ++w) {
      if (w < warp) cells += shared.sums[w];
      sum += shared.sums[w];
    }
    return cells;
  }

  __device__ int cells_of(int b) const { return b < p.problem.B ? extent_of(p, b).cells : 0; }

  __device__ std::int64_t count_all(SharedMemory<C>& shared) const {
    std::int64_t cells = 0, sum;
#pragma unroll 1
    for (int b = static_cast<int>(threadIdx.x); b < p.problem.B; b += C::kThreads) cells += cells_of(b);
    scan(shared, cells, sum);
    return sum;
  }

  // The sequence that holds cell `at`, and the cells of one unit of each sequence before it.
  __device__ void find(SharedMemory<C>& shared, int& b, std::int64_t& before) const {
    before = 0;
#pragma unroll 1
    for (int first = 0; first < p.problem.B; first += C::kThreads) {
      const int mine = first + static_cast<int>(threadIdx.x), cells = cells_of(mine);
      std::int64_t sum;
      const std::int64_t to = before + scan(shared, cells, sum), from = to - cells;
      if (at < (before + sum) * blocks) {
        if (from * blocks <= at && at < to * blocks) {
          shared.found[0] = mine;
          shared.found[1] = from;
        }
        __syncthreads();
        b = static_cast<int>(shared.found[0]);
        before = shared.found[1];
        return;
      }
      before += sum;
    }
  }

  const Params& p;
  const int blocks, group, member;  // of units; of CTAs; in it
  std::int64_t total, at, end, base;
  int groups, sequence = 0;
};

}  // namespace heddle::cuda::sm80::attention_decode

// Scores of blocks and the best of them, without storing scores. A CTA has some positions of one kv head: their rows,
// one for each head of the group, are multiplied with tiles of pooled keys; probabilities are summed over the group in
// the order of heads; and each position keeps its best blocks. Where there are few positions (kShare), a CTA has one,
// and each warp a part of the tiles: what is said of positions below is then said of a position's copies, a warp's
// each.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/sparse/listing.cuh"
#include "cuda/sm80/attention/tile.cuh"
#include "cuda/sm80/select_blocks/params.h"

namespace heddle::cuda::sm80::select_blocks {

constexpr unsigned kAll = 0xffffffff;

// The CTA's positions.
struct Work {
  std::int64_t b, kv_head, first;  // first: row of the first position in its sequence
  Sequence s;
  int count;  // positions that are there
};

__device__ __forceinline__ Work work_of(const Params& p) {
  const SelectProblem& problem = p.problem;
  Work w;
  const unsigned unit = blockIdx.x / static_cast<unsigned>(p.position_tiles),
                 heads = static_cast<unsigned>(problem.Hkv);
  w.b = unit / heads;
  w.kv_head = unit % heads;
  // The last positions first: they see most.
  w.first =
      (p.position_tiles - 1 - static_cast<int>(blockIdx.x % static_cast<unsigned>(p.position_tiles))) * p.positions;
  w.s = problem.sequence(w.b);
  w.count = static_cast<int>(clamped(w.s.q_rows - w.first, 0, p.positions));
  return w;
}

// Positions that are there, or the copies of one.
__device__ __forceinline__ int lists_of(const Params& p, const Work& w) { return p.copies > 1 ? p.copies : w.count; }

// Which row of q is the CTA's `row`.
struct RowAt {
  int position;
  bool there;
  std::int64_t i, h;

  __device__ RowAt(const Params& p, const Work& w, int row) : position(row / p.pitch) {
    const int head = row % p.pitch;
    there = position < lists_of(p, w) && head < p.problem.G;
    i = w.s.q_begin + w.first + (p.copies > 1 ? 0 : position);
    h = w.kv_head * p.problem.G + head;
  }
};

// Of keys, and at first of the CTA's rows of q.
template <class T, int kHead>
using Tile = attention::Tile<T, kTileKeys, kHead>;
static_assert(kRows == kTileKeys);

// A thread's share of each tile: the same piece of every kPass-th row.
template <class T, int kHead>
struct Loader {
  using Tile = Tile<T, kHead>;
  static constexpr int kPass = kThreads / Tile::kChunks;

  // The CTA's rows of q, null where there is none; any: an address to name where nothing is read.
  __device__ static void load_rows(Tile& tile, const std::byte* const (&rows)[kRows], std::int64_t size,
                                   const std::byte* any) {
    const unsigned row = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;
    const std::uint32_t to = ptx::shared_address(&tile);
#pragma unroll 4
    for (unsigned n = row; n < kRows; n += kPass) {
      const bool exists = rows[n] != nullptr && chunk * Tile::kPerChunk < size;
      ptx::copy_async_16(to + attention::swizzled(Tile::kPitch, n, chunk), exists ? rows[n] + 16 * chunk : any, exists);
    }
  }

  __device__ Loader(const Params& p, const Work& w) {
    const Operand& k = p.problem.k;
    const int chunk = static_cast<int>(threadIdx.x) % Tile::kChunks;
    row = static_cast<int>(threadIdx.x) / Tile::kChunks;
    keys = chunk * Tile::kPerChunk < p.problem.D ? static_cast<int>(w.s.sk) : 0;
    pitch = k.stride_s * static_cast<std::int64_t>(sizeof(T));
    const std::int32_t* const table = p.problem.page_table.data;
    pages = table == nullptr ? nullptr : table + w.b * p.problem.page_table_stride;
    from = (pages == nullptr ? k.at(w.b, w.s.k_begin + row, w.kv_head) : k.at(0, 0, w.kv_head)) + 16 * chunk;
  }
  // Pooled keys first to first + kTileKeys, zeros for those that are not there.
  __device__ void operator()(Tile& tile, int first, const Params& p) const {
    const unsigned chunk = threadIdx.x % Tile::kChunks;
    const std::uint32_t to = ptx::shared_address(&tile);
    const std::byte* const any = p.problem.k.data;
    if (pages != nullptr) {
#pragma unroll 1
      for (int n = 0; n < kTileKeys; n += kPass) {
        const int key = first + n + row;
        const std::byte* at = any;
        if (key < keys) {
          const int page = p.by_page.quotient(key);
          at = from +
               clamped(pages[page], 0, p.problem.k_batches - 1) * p.problem.k.stride_b *
                   static_cast<std::int64_t>(sizeof(T)) +
               (key - page * static_cast<int>(p.by_page.divisor)) * pitch;
        }
        ptx::copy_async_16(to + attention::swizzled(Tile::kPitch, static_cast<unsigned>(n + row), chunk), at,
                           key < keys);
      }
      return;
    }
    const std::byte* at = from + first * pitch;
#pragma unroll
    for (int n = 0; n < kTileKeys; n += kPass) {
      const bool exists = first + n + row < keys;
      ptx::copy_async_16(to + attention::swizzled(Tile::kPitch, static_cast<unsigned>(n + row), chunk),
                         exists ? at : any, exists);
      at += kPass * pitch;
    }
  }

 private:
  const std::byte* from;      // in memory, of the thread's first row, or of the first row of page 0
  const std::int32_t* pages;  // of the sequence; null: its pooled keys are side by side
  std::int64_t pitch;         // bytes from row to row
  int row, keys;
};

// A warp's 16 rows of q, and what each of this lane's two may see.
template <class T, int kHead>
struct Rows {
  std::uint32_t q[kHead / 16][4];
  int seen[2];   // pooled keys, the first ones
  float lse[2];  // in log2 units; 0 where it is not given

  // tile: the CTA's rows of q.
  __device__ Rows(const Params& p, const Work& w, const Position* positions, const Tile<T, kHead>& tile) {
    const SelectProblem& problem = p.problem;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowAt at(p, w, 16 * warp + lane / 4 + 8 * r);
      lse[r] = at.there && problem.lse.data != nullptr
                   ? reinterpret_cast<const float*>(problem.lse.data)[problem.lse.offset(w.b, at.h, at.i)] * kLog2e
                   : 0.0f;
      seen[r] = at.there ? positions[at.position].seen : 0;
    }
    const std::uint32_t from = ptx::shared_address(&tile);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      ptx::load_matrix_x4(q[k],
                          from + attention::swizzled(Tile<T, kHead>::kPitch, 16 * warp + lane % 16, 2 * k + lane / 16));
    }
  }

  // Calls use(column, products) for strips of 16 pooled keys of a tile, as two of mma's fragments. A strip at a time,
  // as registers are scarce.
  template <class Use>
  __device__ __forceinline__ void multiply(const Tile<T, kHead>& tile, Use use) const {
    using Tile = Tile<T, kHead>;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::uint32_t from = ptx::shared_address(&tile);
#pragma unroll
    for (int column = 0; column < kTileKeys; column += 16) {
      float s[2][4] = {};
#pragma unroll
      for (int k = 0; k < kHead / 32; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          std::uint32_t b[4];  // two steps of 16 columns
          ptx::load_matrix_x4(b, from + attention::swizzled(Tile::kPitch, column + 8 * n + lane % 8, 4 * k + lane / 8));
          ptx::mma_16816<T>(s[n], q[2 * k], b[0], b[1]);
          ptx::mma_16816<T>(s[n], q[2 * k + 1], b[2], b[3]);
        }
      }
      use(column, s);
    }
  }
  // Element e of the n-th fragment of the strip at `column` of a tile that begins with the pooled key `first`.
  __device__ __forceinline__ bool sees(int first, int column, int n, int e) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return first + column + 8 * n + 2 * (lane % 4) + e % 2 < seen[e / 2];
  }
  // All rows of the warp see the whole tile.
  __device__ __forceinline__ bool see_all(int first) const {
    return __all_sync(kAll, first + kTileKeys <= min(seen[0], seen[1]));
  }
};

// Tiles [0, count), kShare at a time, loaded while those before are used. A warp uses all, or of each kShare its own.
template <class T, int kHead, int kShare, class Use>
__device__ __forceinline__ void for_each_tile(Tile<T, kHead>* tiles, const Params& p, const Loader<T, kHead>& loader,
                                              int count, Use use) {
  static_assert(kShare == 1 || kShare == kWarps);
  const auto load = [&](int n) {
#pragma unroll 1
    for (int m = 0; m < kShare; ++m) {
      loader(tiles[n % 2 * kShare + m], (n * kShare + m) * kTileKeys, p);
    }
  };
  const int turns = (count + kShare - 1) / kShare, mine = kShare == 1 ? 0 : static_cast<int>(threadIdx.x) / kWarp;
  if (turns > 0) load(0);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int n = 0; n < turns; ++n) {
    ptx::copy_async_wait<0>();
    __syncthreads();  // the tiles are there, and all have read those that the next take the place of
    if (n + 1 < turns) load(n + 1);
    ptx::copy_async_commit();
    use(tiles[n % 2 * kShare + mine], (n * kShare + mine) * kTileKeys);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
}

using sparse::Key;
using sparse::key_of;
using sparse::merged;
using sparse::score_of;
using sparse::sorted;

// A position's best blocks: `kept`, the best first, with room for `slots`, and `waiting`, up to one of each lane, which
// beat the last of them when they came. The whole warp.
template <int kPerLane>
struct Best {
  Key *kept, *waiting;
  int slots, free;  // free: of them may be listed
  Position& of;

  // One of each lane, in rising order over the lanes and from call to call: so of equal scores the block that is there
  // stays. A score that is NaN, and one behind the last block that is touched, is none.
  __device__ __forceinline__ void join(float score, int block) const {
    const unsigned lane = threadIdx.x % kWarp, mine = __float_as_uint(score) + 1;
    const bool may = free > 0 && block < of.touched && !isnan(score) && block != of.forced[0] &&
                     block != of.forced[1] && block != of.forced[2];
    unsigned better = __ballot_sync(kAll, may && mine > of.worst);
    if (better == 0) return;
    if (of.waiting + __popc(better) > kWarp) {
      settle();
      better = __ballot_sync(kAll, may && mine > of.worst);
    }
    const int before = of.waiting;
    if ((better >> lane & 1) != 0) waiting[before + __popc(better & ((1u << lane) - 1))] = key_of(mine, block);
    __syncwarp();  // all have read how many wait
    if (lane == 0) of.waiting = before + __popc(better);
    __syncwarp();
  }

  // Those that wait are kept, or given up.
  __device__ __forceinline__ void settle() const {
    const unsigned lane = threadIdx.x % kWarp;
    take(sorted(static_cast<int>(lane) < of.waiting ? waiting[lane] : 0, lane));
    if (lane == 0) of.waiting = 0;
    __syncwarp();
  }

  // Keys in falling order over the lanes.
  __device__ __forceinline__ void take(Key comes) const {
    const unsigned lane = threadIdx.x % kWarp;
    Key last = 0;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int place = static_cast<int>(lane) + kWarp * n;
      const Key here = place < slots ? kept[place] : 0;
      const Key other = __shfl_sync(kAll, comes, kWarp - 1 - lane);
      const Key best = merged(max(here, other), lane);
      comes = merged(min(here, other), lane);
      if (place < slots) kept[place] = best;
      const Key at_end = __shfl_sync(kAll, best, (free - 1) % kWarp);
      if (n == (free - 1) / kWarp) last = at_end;
    }
    __syncwarp();  // all have read what waits, and how many
    if (lane == 0) of.worst = score_of(last);
    __syncwarp();
  }
};

template <class T, int kHead, int kPerLane, int kShare>
__global__ void __launch_bounds__(kThreads, kHead == 64    ? 4
                                            : kHead == 128 ? 3
                                                           : 2) select_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  const SelectProblem& problem = p.problem;
  const Layout at = layout(p, kHead);
  auto* const tiles = reinterpret_cast<Tile<T, kHead>*>(memory);
  float* const probabilities = reinterpret_cast<float*>(memory + at.probabilities);
  float* const sums = reinterpret_cast<float*>(memory + at.sums);
  Key* const kept = reinterpret_cast<Key*>(memory + at.kept);
  Key* const waiting = reinterpret_cast<Key*>(memory + at.waiting);

  __shared__ __align__(16) std::byte work[sizeof(Work)];
  Work& w = *reinterpret_cast<Work*>(work);
  if (threadIdx.x == 0) w = work_of(p);
  __syncthreads();
  if (w.count == 0) return;
  __shared__ const std::byte* rows_of_q[kRows];
  if (threadIdx.x < kRows) {
    const RowAt at(p, w, static_cast<int>(threadIdx.x));
    rows_of_q[threadIdx.x] = at.there ? problem.q.at(w.b, at.i, at.h) : nullptr;
  }
  __syncthreads();
  Loader<T, kHead>::load_rows(tiles[0], rows_of_q, problem.D, problem.q.data);
  ptx::copy_async_commit();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int group = static_cast<int>(problem.G), slots = static_cast<int>(problem.slots);
  // Divisions come before rows of q are in registers.
  Position* const positions = reinterpret_cast<Position*>(memory + at.at);
  const int lists = lists_of(p, w);
  if (thread < lists) {
    Position& of = positions[thread];
    sparse::find_listing(problem, w.s, w.first + (kShare > 1 ? 0 : thread), of);
    of.waiting = 0;
    of.worst = 0;
  }
  for (int n = thread; n < lists * slots; n += kThreads) kept[n] = 0;
  const int width = sum_columns(p.narrow);
  for (int n = thread; n < lists * width; n += kThreads) sums[n] = 0.0f;
  ptx::copy_async_wait<0>();
  __syncthreads();
  Rows<T, kHead> rows(p, w, positions, tiles[0]);
  const int most = positions[w.count - 1].seen, touched = positions[w.count - 1].touched;
  // A warp has the lists of some positions: where it has their rows too, it need not wait for the others.
  const bool own_rows = 16 % p.pitch == 0;
  const int first_position = own_rows ? warp * (16 / p.pitch) : warp, step = own_rows ? 1 : kWarps;
  const int end_position = own_rows ? min(first_position + 16 / p.pitch, lists) : lists;
  const Loader<T, kHead> loader(p, w);
  const auto best_of = [&](int position) {
    Position& of = positions[position];
    return Best<kPerLane>{kept + position * slots, waiting + position * kWarp, slots, slots - of.taken, of};
  };
  __syncthreads();  // rows of q have been read, and a tile of keys takes their place

  if (kShare == 1 && problem.lse.data == nullptr) {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for_each_tile<T, kHead, 1>(tiles, p, loader, (most + kTileKeys - 1) / kTileKeys, [&](const auto& tile, int first) {
      rows.multiply(tile, [&](int column, float(&s)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[n][e] = rows.sees(first, column, n, e) ? s[n][e] * p.scale_log2 : -INFINITY;
          }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float top =
              fmaxf(max[r], fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
          const float base = top == -INFINITY ? 0.0f : top;
          sum[r] *= ptx::exp2_approx(max[r] - base);
          max[r] = top;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            sum[r] += ptx::exp2_approx(s[n][2 * r] - base) + ptx::exp2_approx(s[n][2 * r + 1] - base);
          }
        }
      });
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = largest_of_quad(max[r]), base = top == -INFINITY ? 0.0f : top;
      rows.lse[r] = base + ptx::log2_approx(sum_of_quad(sum[r] * ptx::exp2_approx(max[r] - base)));
    }
  }

  // Blocks that begin behind the last seen key may overlap it.
  const int count = (touched * p.wide + kTileKeys - 1) / kTileKeys;
  for_each_tile<T, kHead, kShare>(tiles, p, loader, count, [&](const auto& tile, int first) {
    const bool all = rows.see_all(first);
    rows.multiply(tile, [&](int column, const float(&s)[2][4]) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 two;
          two.x = ptx::exp2_approx(fmaf(s[n][2 * r], p.scale_log2, -rows.lse[r]));
          two.y = ptx::exp2_approx(fmaf(s[n][2 * r + 1], p.scale_log2, -rows.lse[r]));
          if (!all) {
            if (!rows.sees(first, column, n, 2 * r)) two.x = 0.0f;
            if (!rows.sees(first, column, n, 2 * r + 1)) two.y = 0.0f;
          }
          const int row = 16 * warp + lane / 4 + 8 * r;
          *reinterpret_cast<float2*>(probabilities + row * kPitch + column + 8 * n + 2 * (lane % 4)) = two;
        }
      }
    });
    own_rows ? __syncwarp() : __syncthreads();
    for (int position = first_position; position < end_position; position += step) {
      // Of two columns, over the heads of the group.
      const float* from = probabilities + position * p.pitch * kPitch + lane;
      float sum[2] = {from[0], from[kWarp]};
#pragma unroll 4
      for (int g = 1; g < group; ++g) {
        from += kPitch;
        sum[0] += from[0];
        sum[1] += from[kWarp];
      }
      const Best<kPerLane> best = best_of(position);
      if (p.wide == 1 && p.narrow == 1) {
        best.join(sum[0], first + lane);
        best.join(sum[1], first + kWarp + lane);
        continue;
      }
      // Behind those of the tile before, where pooled keys overlap.
      float* const of = sums + position * width + width - kTileKeys;
      of[lane] = sum[0];
      of[kWarp + lane] = sum[1];
      __syncwarp();
      const int blocks = kTileKeys / p.wide;  // p.wide divides the tile
      for (int base = 0; base < blocks; base += kWarp) {
        const int n = base + lane;
        float score = n < blocks ? 0.0f : NAN;
        for (int offset = 1 - p.narrow; offset < p.wide && n < blocks; ++offset) {
          const int weight = min(p.narrow, p.wide - offset) - max(0, -offset);
          score = fmaf(static_cast<float>(weight), of[p.wide * n + offset], score);
        }
        best.join(score, first / p.wide + n);
      }
      __syncwarp();
      if (p.narrow > 1) {
        of[lane - kTileKeys] = sum[0];
        of[lane + kWarp - kTileKeys] = sum[1];
      }
    }
  });

  for (int position = first_position; position < end_position; position += step) {
    if (const Best<kPerLane> best = best_of(position); best.free > 0) best.settle();
  }
  if constexpr (kShare > 1) {
    __syncthreads();  // the copies' lists are whole
    if (warp > 0) return;
    const Best<kPerLane> best = best_of(0);
    for (int other = 1; other < lists && best.free > 0; ++other) {
      for (int first = 0; first < slots; first += kWarp) {
        best.take(first + lane < slots ? kept[other * slots + first + lane] : 0);
      }
    }
  }
  for (int position = first_position; position < (kShare > 1 ? 1 : end_position); position += step) {
    sparse::write_list(positions[position], problem.list(w.b, w.s, w.first + position, w.kv_head), slots,
                       kept + position * slots, lane);
  }
}

}  // namespace heddle::cuda::sm80::select_blocks

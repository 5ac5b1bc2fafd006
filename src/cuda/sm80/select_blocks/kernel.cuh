// Scores of blocks and the best of them, without storing scores. A CTA has some positions of one kv head: their rows,
// one for each head of the group, are multiplied with tiles of pooled keys; probabilities are summed over the group in
// the order of heads; and each position keeps its best blocks.
#pragma once

#include <climits>

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
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

template <class T, int kHead>
using KeyTile = attention::Tile<T, kTileKeys, kHead>;

template <class T, int kHead>
__device__ inline void load_tile(KeyTile<T, kHead>& tile, const Params& p, const Work& w, int first) {
  using Tile = KeyTile<T, kHead>;
  const Operand& k = p.problem.k;
  const std::uint32_t to = ptx::shared_address(&tile);
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < kTileKeys * Tile::kChunks; n += kThreads) {
    const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
    const bool exists = first + row < w.s.sk && chunk * Tile::kPerChunk < p.problem.D;
    const std::byte* const from = exists ? k.at(w.b, w.s.k_begin + first + row, w.kv_head) + 16 * chunk : k.data;
    ptx::copy_async_16(to + attention::swizzled(Tile::kPitch, row, chunk), from, exists);
  }
}

// A warp's 16 rows of q, and what each of this lane's two may see.
template <class T, int kHead>
struct Rows {
  std::uint32_t q[kHead / 16][4];
  int seen[2];   // pooled keys, the first ones
  float lse[2];  // in log2 units; 0 where it is not given

  __device__ Rows(const Params& p, const Work& w, const Position* positions) {
    const SelectProblem& problem = p.problem;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int group = static_cast<int>(problem.G);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * warp + lane / 4 + 8 * r, position = row / group;
      const bool there = position < w.count;
      const std::int64_t i = w.s.q_begin + w.first + position, h = w.kv_head * problem.G + row % group;
      lse[r] = there && problem.lse.data != nullptr
                   ? reinterpret_cast<const float*>(problem.lse.data)[problem.lse.offset(w.b, h, i)] * kLog2e
                   : 0.0f;
      seen[r] = there ? positions[position].seen : 0;
      const std::byte* const from = there ? problem.q.at(w.b, i, h) + 4 * (lane % 4) : nullptr;
#pragma unroll
      for (int k = 0; k < kHead / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool exists = there && 16 * k + 8 * half < problem.D;
          q[k][2 * half + r] = exists ? *reinterpret_cast<const std::uint32_t*>(from + 32 * k + 16 * half) : 0;
        }
      }
    }
  }

  // Calls use(column, scores) for strips of 16 pooled keys of a tile: scores in log2 units, -inf where a row does not
  // see the key, as two of mma's fragments. A strip at a time, as registers are scarce.
  template <class Use>
  __device__ __forceinline__ void scores(const Params& p, const KeyTile<T, kHead>& tile, int first, Use use) const {
    using Tile = KeyTile<T, kHead>;
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
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool sees = first + column + 8 * n + 2 * (lane % 4) + e % 2 < seen[e / 2];
          s[n][e] = sees ? s[n][e] * p.scale_log2 : -INFINITY;
        }
      }
      use(column, s);
    }
  }
};

// Tiles [0, count) one after the other, each loaded while the one before is used.
template <class T, int kHead, class Use>
__device__ __forceinline__ void for_each_tile(KeyTile<T, kHead>* tiles, const Params& p, const Work& w, int count,
                                              Use use) {
  if (count > 0) load_tile<T, kHead>(tiles[0], p, w, 0);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    ptx::copy_async_wait<0>();
    __syncthreads();  // tile n is there, and all have read the one that the next takes the place of
    if (n + 1 < count) load_tile<T, kHead>(tiles[(n + 1) % 2], p, w, (n + 1) * kTileKeys);
    ptx::copy_async_commit();
    use(tiles[n % 2], n * kTileKeys);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
}

// A block that may be listed. Of two the one with the higher score is better, and of equal ones the lower number.
struct Candidate {
  unsigned score;  // bits of a score, which is not negative, and one more; 0: no block
  int block;

  __device__ bool better_than(const Candidate& other) const {
    return score > other.score || (score == other.score && block < other.block);
  }
};
constexpr int kNoBlock = INT_MAX;

// The best blocks of a position, kPerLane of them in a lane, in no order. The whole warp.
template <int kPerLane>
struct Best {
  Candidate entry[kPerLane];
  Candidate worst;  // of all

  __device__ __forceinline__ void load(const Candidate* from, int count) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      entry[n] = lane + kWarp * n < count ? from[lane + kWarp * n] : Candidate{~0u, -1};  // never the worst
    }
    find_worst();
  }
  __device__ __forceinline__ void store(Candidate* to, int count) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      if (lane + kWarp * n < count) to[lane + kWarp * n] = entry[n];
    }
  }
  // Each lane's candidate joins if it is better than the worst, the lowest lane's first.
  __device__ __forceinline__ void join(const Candidate& mine) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    unsigned better = __ballot_sync(kAll, mine.better_than(worst));
    while (better != 0) {
      const int from = __ffs(static_cast<int>(better)) - 1;
      const Candidate joins{__shfl_sync(kAll, mine.score, from), __shfl_sync(kAll, mine.block, from)};
      // Several places may be empty: one lane gives one.
      bool has = false;
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) has = has || is_worst(entry[n]);
      const unsigned holders = __ballot_sync(kAll, has);
      bool wanted = lane == __ffs(static_cast<int>(holders)) - 1;
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) {
        if (wanted && is_worst(entry[n])) {
          entry[n] = joins;
          wanted = false;
        }
      }
      find_worst();
      better &= ~(1u << from);
      better &= __ballot_sync(kAll, mine.better_than(worst));
    }
  }

 private:
  __device__ bool is_worst(const Candidate& x) const { return x.score == worst.score && x.block == worst.block; }
  __device__ __forceinline__ void find_worst() {
    unsigned score = entry[0].score;
#pragma unroll
    for (int n = 1; n < kPerLane; ++n) score = min(score, entry[n].score);
    worst.score = __reduce_min_sync(kAll, score);
    int block = -1;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      if (entry[n].score == worst.score) block = max(block, entry[n].block);
    }
    worst.block = __reduce_max_sync(kAll, block);
  }
};

template <class T, int kHead, int kPerLane>
__global__ void __launch_bounds__(kThreads, kHead == 64    ? 4
                                            : kHead == 128 ? 3
                                                           : 2) select_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  const SelectProblem& problem = p.problem;
  const Layout at = layout(kHead, static_cast<std::size_t>(p.positions), static_cast<std::size_t>(problem.slots));
  auto* const tiles = reinterpret_cast<KeyTile<T, kHead>*>(memory);
  float* const probabilities = reinterpret_cast<float*>(memory + at.probabilities);
  float* const sums = reinterpret_cast<float*>(memory + at.sums);
  Candidate* const best = reinterpret_cast<Candidate*>(memory + at.best);

  __shared__ __align__(16) std::byte work[sizeof(Work)];
  Work& w = *reinterpret_cast<Work*>(work);
  if (threadIdx.x == 0) w = work_of(p);
  __syncthreads();
  if (w.count == 0) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int group = static_cast<int>(problem.G), slots = static_cast<int>(problem.slots);
  // Divisions come before rows of q are in registers.
  Position* const positions = reinterpret_cast<Position*>(memory + at.at);
  if (thread < w.count) {
    const std::int64_t t = problem.position(w.s, w.first + thread), seen = problem.seen(w.s, t);
    Position& of = positions[thread];
    of = {static_cast<int>(seen), static_cast<int>(problem.touched(seen)), {-1, -1, -1}, 0};
    // SelectProblem::forced_at(), without memory of its own.
    int last = -1;
    const auto add = [&](int block) {
      if (block > last) last = of.forced[of.taken++] = block;
    };
    const int current = static_cast<int>(t / problem.block_size);
    if (problem.forced.first) add(0);
    if (problem.forced.previous) add(current - 1);
    if (problem.forced.current) add(current);
  }
  __syncthreads();
  Rows<T, kHead> rows(p, w, positions);
  const int most = positions[w.count - 1].seen, touched = positions[w.count - 1].touched;

  if (problem.lse.data == nullptr) {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for_each_tile<T, kHead>(tiles, p, w, (most + kTileKeys - 1) / kTileKeys, [&](const auto& tile, int first) {
      rows.scores(p, tile, first, [&](int, const float(&s)[2][4]) {
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

  for (int n = thread; n < p.positions * slots; n += kThreads) best[n] = {0, kNoBlock};
  for (int n = thread; n < p.positions * 2 * kTileKeys; n += kThreads) sums[n] = 0.0f;
  // Blocks that begin behind the last seen key may overlap it.
  const int count = (touched * p.wide + kTileKeys - 1) / kTileKeys;
  for_each_tile<T, kHead>(tiles, p, w, count, [&](const auto& tile, int first) {
    rows.scores(p, tile, first, [&](int column, const float(&s)[2][4]) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 two;
          two.x = s[n][2 * r] == -INFINITY ? 0.0f : ptx::exp2_approx(s[n][2 * r] - rows.lse[r]);
          two.y = s[n][2 * r + 1] == -INFINITY ? 0.0f : ptx::exp2_approx(s[n][2 * r + 1] - rows.lse[r]);
          const int row = 16 * warp + lane / 4 + 8 * r;
          *reinterpret_cast<float2*>(probabilities + row * kPitch + column + 8 * n + 2 * (lane % 4)) = two;
        }
      }
    });
    __syncthreads();
    for (int n = thread; n < w.count * kTileKeys; n += kThreads) {
      const int position = n / kTileKeys, column = n % kTileKeys;
      const float* const from = probabilities + position * group * kPitch + column;
      float sum = 0.0f;
#pragma unroll 4
      for (int g = 0; g < group; ++g) sum += from[g * kPitch];
      sums[position * 2 * kTileKeys + kTileKeys + column] = sum;
    }
    __syncthreads();
    for (int position = warp; position < w.count; position += kWarps) {
      const Position& here = positions[position];
      const int free = slots - here.taken;
      float* const of = sums + position * 2 * kTileKeys;
      if (free > 0) {
        Best<kPerLane> list;
        list.load(best + position * slots, free);
        for (int base = 0; base < kTileKeys / p.wide; base += kWarp) {
          const int n = base + lane, block = first / p.wide + n;  // p.wide divides the tile
          Candidate candidate{0, kNoBlock};
          if (n < kTileKeys / p.wide && block < here.touched && block != here.forced[0] && block != here.forced[1] &&
              block != here.forced[2]) {
            float score = 0.0f;
            for (int offset = 1 - p.narrow; offset < p.wide; ++offset) {
              const int weight = min(p.narrow, p.wide - offset) - max(0, -offset);
              score = fmaf(static_cast<float>(weight), of[kTileKeys + p.wide * n + offset], score);
            }
            if (!isnan(score)) candidate = {__float_as_uint(score) + 1, block};
          }
          list.join(candidate);
        }
        list.store(best + position * slots, free);
      }
      __syncwarp();
      if (p.narrow > 1) {
        for (int column = lane; column < kTileKeys; column += kWarp) of[column] = of[kTileKeys + column];
      }
    }
  });

  for (int position = warp; position < w.count; position += kWarps) {
    const std::int64_t i = w.first + position;
    const Position& here = positions[position];
    std::int32_t* const list = problem.list(w.b, w.s, i, w.kv_head);
    const int taken = here.taken, free = slots - taken;
    if (lane < min(taken, slots)) list[lane] = here.forced[lane];
    const Candidate* const from = best + position * slots;
    for (int n = lane; n < free; n += kWarp) {
      const Candidate mine = from[n];
      int before = 0;  // entries that are better; among places that are empty the first ones
      for (int other = 0; other < free; ++other) {
        before += from[other].better_than(mine) || (from[other].score == 0 && mine.score == 0 && other < n);
      }
      list[taken + before] = mine.score == 0 ? -1 : mine.block;
    }
  }
}

}  // namespace heddle::cuda::sm80::select_blocks

// A step of decoding of native sparse attention in one launch. A cluster of CTAs has a sequence's key/value head, a
// unit, from its beginning to its end, and units know nothing of each other. The query heads of the group are the rows
// of matrix products, and warps share out tiles of keys.
//
// Who may write shared memory when, by the barriers that all of the CTA (or, where it says so, the cluster) come to:
//   1  q, gates, lists and fresh rows are there; before it each was written by one thread, and read by none
//   2  each warp's O, in its own ring, whose loads it has waited for, and its statistics are there
//   3  cluster: the CTA's O and statistics of two branches are there. Warps' O has been read, so that rings are free
//   4  the lse is there
//   5  each warp's list of best blocks is there
//   6  cluster: the CTA's best blocks are there. Warps' lists have been read, and CTAs' take their place
//   7  the CTAs' lists are there
//   8  the chosen blocks are there
//   9  as 2, of the selected branch. Statistics of warps, written anew, were last read before 3
//   10 cluster: the CTA's O of the selected branch is there
//   11 cluster: no CTA ends while another reads its memory
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/nsa_step/choice.cuh"
#include "cuda/sm90/nsa_step/rows.cuh"

namespace heddle::cuda::sm90::nsa_step {

__device__ __forceinline__ int divided_up(int a, int b) { return (a + b - 1) / b; }

// What the CTA has to do.
struct Work {
  NsaStepProblem::Step step;
  int unit, b, h;  // h: key/value head
  int rank, ctas;  // of the cluster
  int cmp_tiles, swa_tiles, swa_first;
  int cmp_warps;  // of each CTA, the first ones; the others have the window

  __device__ explicit Work(const Params& p) {
    ctas = p.cluster;
    rank = ctas > 1 ? ptx::cluster_rank() : 0;
    unit = static_cast<int>(blockIdx.x) / ctas;
    b = unit / static_cast<int>(p.problem.H);
    h = unit - b * static_cast<int>(p.problem.H);
    step = p.problem.step(b);
    const int keys = static_cast<int>(step.keys);
    cmp_tiles = divided_up(static_cast<int>(step.complete), kTileKeys);
    swa_first = p.problem.window < keys ? keys - static_cast<int>(p.problem.window) : 0;
    swa_tiles = p.problem.g_swa.given && p.problem.window > 0 ? divided_up(keys - swa_first, kTileKeys) : 0;
    const std::int64_t tiles = std::int64_t{cmp_tiles} + swa_tiles;
    // Warps in the ratio of tiles, at least one for each branch that has some.
    cmp_warps =
        swa_tiles == 0 ? kWarps
        : cmp_tiles == 0
            ? 0
            : max(1, min(kWarps - 1, static_cast<int>((2 * kWarps * std::int64_t{cmp_tiles} + tiles) / (2 * tiles))));
  }
  // All threads of the cluster; what they wrote to shared memory is there for each other.
  __device__ void meet() const {
    if (ctas > 1) {
      ptx::cluster_meet();
    } else {
      __syncthreads();
    }
  }
  // Where CTA `of` of the cluster has what this one has at `here`.
  __device__ std::uint32_t at(const void* here, int of) const {
    const std::uint32_t address = ptx::shared_address(here);
    return ctas > 1 ? ptx::remote_address(address, of) : address;
  }
};

// The part of `tiles` tiles that this warp has, of `warps` in each CTA: every `step`-th from `begin` on. Neighbours go
// to different CTAs, so that CTA n has the tiles n, n + ctas, ...
struct Share {
  int begin, step, count;

  __device__ Share(const Work& w, int warp, int warps, int tiles)
      : begin(warp * w.ctas + w.rank),
        step(warps * w.ctas),
        count(tiles > begin ? divided_up(tiles - begin, step) : 0) {}
};

template <class Element>
__device__ __forceinline__ float element_at(const Plane& plane, std::int64_t at) {
  return static_cast<float>(reinterpret_cast<const Element*>(plane.data)[at]);
}
__device__ __forceinline__ float gate_at(const Plane& plane, std::int64_t b, std::int64_t h) {
  const std::int64_t at = plane.offset(b, h, 0);
  return plane.dtype == DType::f32   ? element_at<float>(plane, at)
         : plane.dtype == DType::f16 ? element_at<__half>(plane, at)
                                     : element_at<__nv_bfloat16>(plane, at);
}

// One group of copies, empty where rows are read by elements.
template <int kHead>
__device__ void load_rows_of_q(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  using Tile = Tile<kHead>;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * Tile::kChunks; n += kThreads) {
    const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
    const bool there = row < problem.G && chunk * 8 < problem.D;
    const std::byte* const from = there ? problem.q.at(w.b, 0, w.h * problem.G + row) : problem.q.data;
    std::byte* const to = shared.q.bytes + Tile::offset(row, chunk);
    if (p.wide_in) {
      ptx::copy_async_16(ptx::shared_address(to), from + (there ? 16 * chunk : 0), there);
    } else {
      *reinterpret_cast<uint4*>(to) = there ? load_chunk(from, problem.q.stride_d, chunk, problem.D, false) : uint4{};
    }
  }
  ptx::copy_async_commit();
}

// The gates, by the last warps, which have nothing else to fetch; and lists that are empty.
template <int kHead>
__device__ void load_gates(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  if (threadIdx.x < kMostSlots) {
    shared.best[threadIdx.x] = 0;
    shared.list[threadIdx.x] = -1;
  }
  const int n = static_cast<int>(threadIdx.x) - (kThreads - kBranches * kRows);
  if (n < 0) return;
  const int branch = n / kRows, row = n % kRows;
  const Plane& gate = branch == kCmp ? problem.g_cmp : branch == kSlc ? problem.g_slc : problem.g_swa;
  shared.gate[branch][row] = gate.given && row < problem.G ? gate_at(gate, w.b, w.h * problem.G + row) : 0.0f;
}

// The step's key and value: into shared memory, from where every tile takes them that has them, and by one CTA into the
// cache, where nobody reads them before the next launch.
template <int kHead>
__device__ void append(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  constexpr int kChunks = Tile<kHead>::kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  if (!w.step.appends || thread >= 2 * kChunks) return;
  const bool of_v = thread >= kChunks;
  const int chunk = thread % kChunks;
  const std::int64_t size = of_v ? problem.Dv : problem.D;
  const Operand &from = of_v ? problem.v_new : problem.k_new, &to = of_v ? problem.v : problem.k;
  const uint4 words = load_chunk(from.at(w.b, 0, w.h), from.stride_d, chunk, size, p.wide_in);
  shared.new_key[of_v][chunk] = words;
  if (w.rank == 0 && chunk * 8 < size) {
    *reinterpret_cast<uint4*>(to.at(w.b, w.step.keys - 1, w.h) + 16 * chunk) = words;
  }
}

// The means of the block that the step's key ends, by the CTA that has its tile: sums in the order of keys, as
// pool_keys has them. Into shared memory for that tile, and among the pooled keys for later launches.
template <class T, int kHead>
__device__ void pool(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  constexpr int kChunks = Tile<kHead>::kChunks;
  const int thread = static_cast<int>(threadIdx.x) - 2 * kWarp;  // beside those that append
  if (!w.step.completes || thread < 0 || thread >= 2 * kChunks) return;
  const std::int64_t row = w.step.complete - 1, last = w.step.keys - 1;
  if (row / kTileKeys % w.ctas != w.rank) return;
  const bool of_v = thread >= kChunks;
  const int chunk = thread % kChunks;
  const std::int64_t size = of_v ? problem.Dv : problem.D;
  const Operand &cache = of_v ? problem.v : problem.k, &fresh = of_v ? problem.v_new : problem.k_new,
                &to = of_v ? problem.v_pooled : problem.k_pooled;
  uint4 words = {};
  if (chunk * 8 < size) {
    float x[8] = {};
    const auto add = [&](const uint4& piece) {
      const std::uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 two = ptx::unpack2<T>(pairs[n]);
        x[2 * n] += two.x;
        x[2 * n + 1] += two.y;
      }
    };
    const std::byte* at = cache.at(w.b, last + 1 - problem.block, w.h) + 16 * chunk;
    const std::int64_t pitch = cache.stride_s * 2;
#pragma unroll 15
    for (int n = 1; n < static_cast<int>(problem.block); ++n) {
      add(*reinterpret_cast<const uint4*>(at));
      at += pitch;
    }
    add(load_chunk(fresh.at(w.b, 0, w.h), fresh.stride_d, chunk, size, p.wide_in));
    const auto keys = static_cast<float>(problem.block);
    words = {ptx::pack2<T>(x[0] / keys, x[1] / keys), ptx::pack2<T>(x[2] / keys, x[3] / keys),
             ptx::pack2<T>(x[4] / keys, x[5] / keys), ptx::pack2<T>(x[6] / keys, x[7] / keys)};
    *reinterpret_cast<uint4*>(to.at(w.b, row, w.h) + 16 * chunk) = words;
  }
  shared.new_pooled[of_v][chunk] = words;
}

// What a warp found: its O where its ring was, and its statistics.
template <int kHead, class Walk>
__device__ __forceinline__ void leave_result(SharedMemory<kHead>& shared, const Walk& walk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  float4* const mine = shared.warp_o(warp);
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n) {
    mine[n * kWarp + lane] = make_float4(walk.o[n][0], walk.o[n][1], walk.o[n][2], walk.o[n][3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_quad(walk.state.sum[r]);
    if (lane % 4 == 0) {
      shared.top[warp][lane / 4 + 8 * r] = walk.state.max[r];
      shared.sum[warp][lane / 4 + 8 * r] = sum;
    }
  }
}

// The results of warps [first, end) become the CTA's of a branch; of no warps it is zeros.
template <int kHead>
__device__ void join_warps(SharedMemory<kHead>& shared, int branch, int first, int end) {
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kHead / 8 * kWarp; n += kThreads) {
    const int lane = n % kWarp, column = n / kWarp * 8 + lane % 4 * 2;
    float top[2] = {-INFINITY, -INFINITY}, base[2], sum[2] = {}, o[4] = {};
#pragma unroll 1
    for (int warp = first; warp < end; ++warp) {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], shared.top[warp][lane / 4 + 8 * r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = top[r] == -INFINITY ? 0.0f : top[r];
#pragma unroll 2
    for (int warp = first; warp < end; ++warp) {
      const float4 from = shared.warp_o(warp)[n];
      const float x[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        const float weight = ptx::exp2_approx(shared.top[warp][row] - base[r]);
        sum[r] = fmaf(shared.sum[warp][row], weight, sum[r]);
        o[2 * r] = fmaf(x[2 * r], weight, o[2 * r]);
        o[2 * r + 1] = fmaf(x[2 * r + 1], weight, o[2 * r + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      *reinterpret_cast<float2*>(shared.partial_row(branch, row) + column) = make_float2(o[2 * r], o[2 * r + 1]);
      if (column == 0) shared.statistics[branch][row] = make_float2(top[r], sum[r]);
    }
  }
}

// The best blocks of this warp's share of the CTA's tiles, over the lanes. Reads scores that other warps of this CTA
// have written, which a barrier of the CTA has ordered.
template <int kHead>
__device__ __forceinline__ Key best_of_warp(const Params& p, const Work& w, const SharedMemory<kHead>& shared,
                                            const float* scores, const Forced& forced, int free) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int tiles = w.cmp_tiles > w.rank ? divided_up(w.cmp_tiles - w.rank, w.ctas) : 0;  // of this CTA
  const int group = static_cast<int>(p.problem.G);
  Key kept = 0, worst = 0;
  if (free <= 0) return 0;
#pragma unroll 1
  for (int n = 2 * warp; n < tiles; n += 2 * kWarps) {  // two tiles at a time, a key each lane
    const int block = ((n + lane / kTileKeys) * w.ctas + w.rank) * kTileKeys + lane % kTileKeys;
    Key comes = 0;
    if (block < w.step.complete && !forced.holds(block)) {
      float score = 0.0f;
#pragma unroll 8
      for (int g = 0; g < group; ++g) {
        score += ptx::exp2_approx(scores[static_cast<std::int64_t>(g) * p.score_pitch + block] - shared.lse[g]);
      }
      if (!isnan(score)) comes = key_of(score, block);
    }
    if (!__any_sync(kAll, comes > worst)) continue;
    // The larger of a falling and a rising run, place by place, are the best of both, as a run that rises and falls.
    const Key rising = __shfl_sync(kAll, sorted(comes, lane), kWarp - 1 - lane);
    kept = merged(max(kept, rising), lane);
    worst = __shfl_sync(kAll, kept, free - 1);
  }
  return kept;
}

// Each CTA has a part of the columns of all branches, and reads those of all CTAs.
template <class T, int kHead>
__device__ void write_out(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  const int quads = static_cast<int>(problem.Dv) / 4, items = static_cast<int>(problem.G) * quads;
  const int each = divided_up(items, w.ctas), end = min((w.rank + 1) * each, items);
#pragma unroll 1
  for (int n = w.rank * each + static_cast<int>(threadIdx.x); n < end; n += kThreads) {
    const int row = n / quads, column = (n - row * quads) * 4;
    float4 total = {};
#pragma unroll
    for (int branch = 0; branch < kBranches; ++branch) {
      if (!(branch == kCmp ? problem.g_cmp : branch == kSlc ? problem.g_slc : problem.g_swa).given) continue;
      float2 statistics[kMostCluster];
      float4 part[kMostCluster];
      float top = -INFINITY;
#pragma unroll
      for (int of = 0; of < kMostCluster; ++of) {
        statistics[of] = {-INFINITY, 0.0f};
        part[of] = {};
        if (of < w.ctas) {
          statistics[of] = ptx::load_remote_float2(w.at(&shared.statistics[branch][row], of));
          part[of] = ptx::load_remote_float4(w.at(shared.partial_row(branch, row) + column, of));
        }
      }
#pragma unroll
      for (int of = 0; of < kMostCluster; ++of) top = fmaxf(top, statistics[of].x);
      const float base = top == -INFINITY ? 0.0f : top;
      float sum = 0.0f;
      float4 o = {};
#pragma unroll
      for (int of = 0; of < kMostCluster; ++of) {
        const float weight = ptx::exp2_approx(statistics[of].x - base);
        sum = fmaf(statistics[of].y, weight, sum);
        o.x = fmaf(part[of].x, weight, o.x);
        o.y = fmaf(part[of].y, weight, o.y);
        o.z = fmaf(part[of].z, weight, o.z);
        o.w = fmaf(part[of].w, weight, o.w);
      }
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum, gate = shared.gate[branch][row];
      total.x = fmaf(gate, o.x * factor, total.x);
      total.y = fmaf(gate, o.y * factor, total.y);
      total.z = fmaf(gate, o.z * factor, total.z);
      total.w = fmaf(gate, o.w * factor, total.w);
    }
    const uint2 words = {ptx::pack2<T>(total.x, total.y), ptx::pack2<T>(total.z, total.w)};
    auto* const to = reinterpret_cast<std::uint16_t*>(problem.out.at(w.b, 0, w.h * problem.G + row));
    if (p.wide_out) {
      *reinterpret_cast<uint2*>(to + column) = words;
    } else {
      const std::uint32_t pairs[2] = {words.x, words.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[(column + e) * problem.out.stride_d] = static_cast<std::uint16_t>(pairs[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

template <class T, int kHead>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHead>*>(memory);
  const NsaStepProblem& problem = p.problem;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  wait_for_previous_grid();
  let_next_grid_start();
  const Work w(p);
  const int keys = static_cast<int>(w.step.keys), complete = static_cast<int>(w.step.complete);
  float* const scores =
      p.scores + static_cast<std::int64_t>(w.unit) * static_cast<std::int64_t>(problem.G) * p.score_pitch;

  // Keys of the cache; the step's own is fresh.
  const Source cache{problem.k.at(w.b, 0, w.h),
                     problem.v.at(w.b, 0, w.h),
                     problem.k.stride_s * 2,
                     problem.v.stride_s * 2,
                     w.step.appends ? keys - 1 : keys,
                     keys,
                     shared.new_key[0],
                     shared.new_key[1]};
  std::uint32_t q[kHead / 16][4];
  {
    const Source pooled{problem.k_pooled.at(w.b, 0, w.h),
                        problem.g_cmp.given ? problem.v_pooled.at(w.b, 0, w.h) : nullptr,
                        problem.k_pooled.stride_s * 2,
                        problem.v_pooled.stride_s * 2,
                        w.step.completes ? complete - 1 : complete,
                        complete,
                        shared.new_pooled[0],
                        shared.new_pooled[1]};
    const bool of_window = warp >= w.cmp_warps;
    const Source from = of_window ? cache : pooled;
    const Share share = of_window ? Share(w, warp - w.cmp_warps, kWarps - w.cmp_warps, w.swa_tiles)
                                  : Share(w, warp, w.cmp_warps, w.cmp_tiles);
    const int first = of_window ? w.swa_first : 0;
    const auto first_row = [&](int n) { return first + (share.begin + n * share.step) * kTileKeys; };
    Walk<T, kHead, decltype(first_row)> walk(problem, shared.ring[warp], from, share.count, first_row);
    load_rows_of_q(p, w, shared);
    walk.begin();
    load_gates(p, w, shared);
    append(p, w, shared);
    pool<T>(p, w, shared);
    ptx::copy_async_wait<decltype(walk)::kStages - 1>();  // q is older than the groups of begin()
    __syncthreads();                                      // 1
    const std::uint32_t q_at = ptx::shared_address(&shared.q);
#pragma unroll
    for (int n = 0; n < kHead / 16; ++n) {
      ptx::load_matrix_x4(q[n], q_at + Tile<kHead>::offset(lane % 16, 2 * n + lane / 16));
    }
    walk.run(q, p.scale_log2, {of_window ? nullptr : scores, p.score_pitch, static_cast<int>(problem.G)});
    leave_result(shared, walk);
  }
  __syncthreads();  // 2
  join_warps(shared, kCmp, 0, w.cmp_warps);
  join_warps(shared, kSwa, w.cmp_warps, kWarps);
  w.meet();  // 3
  if (thread < kRows) {
    float2 statistics[kMostCluster];
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int of = 0; of < kMostCluster; ++of) {
      statistics[of] = {-INFINITY, 0.0f};
      if (of < w.ctas) statistics[of] = ptx::load_remote_float2(w.at(&shared.statistics[kCmp][thread], of));
      top = fmaxf(top, statistics[of].x);
    }
    const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int of = 0; of < kMostCluster; ++of) {
      sum = fmaf(statistics[of].y, ptx::exp2_approx(statistics[of].x - base), sum);
    }
    shared.lse[thread] = base + ptx::log2_approx(sum);
  }
  __syncthreads();  // 4
  const Forced forced(problem, keys - 1, p.block_log2);
  const int slots = static_cast<int>(problem.slots), taken = min(forced.count, slots), free = slots - taken;
  Key mine = best_of_warp(p, w, shared, scores, forced, free);
  shared.lists[warp][lane] = mine;
  __syncthreads();  // 5
  if (mine != 0) {
    const int place = place_among(shared.lists, kWarps, warp, lane, mine);
    if (place < free) shared.best[place] = mine;
  }
  w.meet();  // 6
  if (warp < w.ctas) {
    const float2 words = ptx::load_remote_float2(w.at(&shared.best[lane], warp));
    mine = Key{__float_as_uint(words.y)} << 32 | __float_as_uint(words.x);
    shared.lists[warp][lane] = mine;
  }
  __syncthreads();  // 7
  if (warp < w.ctas && mine != 0) {
    const int place = place_among(shared.lists, w.ctas, warp, lane, mine);
    if (place < free) shared.list[taken + place] = block_of(mine);
  }
  if (thread == 0) {
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      if (n < taken) shared.list[n] = forced.block[n];
    }
  }
  __syncthreads();  // 8
  {
    // A row without keys lists what is not there.
    const int count = keys > 0 ? __popc(__ballot_sync(kAll, shared.list[lane] >= 0)) : 0;
    const int tiles_log2 = p.block_log2 - 4;  // of a block
    const Share share(w, warp, kWarps, count << tiles_log2);
    const auto first_row = [&](int n) {
      const int tile = share.begin + n * share.step, slot = tile >> tiles_log2;
      return (shared.list[slot] << p.block_log2) + (tile - (slot << tiles_log2)) * kTileKeys;
    };
    Walk<T, kHead, decltype(first_row)> walk(problem, shared.ring[warp], cache, share.count, first_row);
    walk.begin();
    walk.run(q, p.scale_log2, {});
    leave_result(shared, walk);
  }
  __syncthreads();  // 9
  join_warps(shared, kSlc, 0, kWarps);
  w.meet();  // 10
  write_out<T>(p, w, shared);
  w.meet();  // 11
}

}  // namespace heddle::cuda::sm90::nsa_step

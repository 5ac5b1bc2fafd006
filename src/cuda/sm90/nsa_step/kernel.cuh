// A step of decoding of native sparse attention in one launch. A cluster of CTAs has a sequence's key/value head, a
// unit, from its beginning to its end, and units know nothing of each other. The query heads of the group are the rows
// of matrix products, and warps share out tiles of keys.
//
// Who may write shared memory when, by the barriers that all of the CTA (or, where it says so, the cluster) come to:
//   1  q, gates, fresh rows and the ended block's are there; before it each was written by one thread, and read by none
//   1b (of a CTA that pools) its means are there, and the block has been read: the rings' last stages are the warps'
//   2  each warp's O, in its own ring, whose loads it has waited for, and its statistics are there
//   3  cluster: the CTA's O and statistics of two branches are there. Warps' O has been read, so that rings are free,
//      and each warp begins to load forced blocks into its own
//   4  the lse is there
//   5  each warp's list of best blocks is there
//   6  cluster: the CTA's best blocks are there. Warps' lists have been read, and CTAs' take their place
//   7  the CTAs' lists are there
//   8  the chosen blocks are there
//   9  as 2, of the selected branch. Statistics of warps, written anew, were last read before 3
//   10 cluster: the CTA's O of the selected branch is there
//   11 cluster: no CTA ends while another reads its memory
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/sm90/nsa_step/choice.cuh"
#include "cuda/sm90/nsa_step/first_rows.cuh"
#include "cuda/sm90/nsa_step/results.cuh"
#include "cuda/sm90/nsa_step/rows.cuh"

namespace heddle::cuda::sm90::nsa_step {

// kPaged: over a cache in pages.
template <class T, int kHead, bool kPaged>
__global__ void __launch_bounds__(kThreads, 1) step_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<kHead>*>(memory);
  constexpr int kStages = SharedMemory<kHead>::kStages;
  const NsaStepProblem& problem = p.problem;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  wait_for_previous_grid();
  let_next_grid_start();
  Work w(p);
  // What need not know the length is on its way while that comes.
  copy_rows(p, w, shared);
  const GateAt gate_at(problem);
  const float gate = gate_at.load(problem, w);
  w.find_tiles(p);
  float* const scores =
      p.scores + static_cast<std::int64_t>(w.unit) * static_cast<std::int64_t>(problem.G) * p.score_pitch;

  // Keys of the cache; the step's own is fresh.
  const std::int64_t batch = kPaged ? 0 : w.b;
  const auto pages = [&](const Divisor& rows, const Operand& k, const Operand& v) {
    if constexpr (kPaged) {
      return Pages{problem.page_table + w.b * problem.page_table_stride, rows, problem.pages, k.stride_b * 2,
                   v.stride_b * 2};
    } else {
      return NoPages{};
    }
  };
  const Source<kPaged> cache{problem.k.at(batch, 0, w.h),
                             problem.v.at(batch, 0, w.h),
                             problem.k.stride_s * 2,
                             problem.v.stride_s * 2,
                             w.step.appends ? w.keys - 1 : w.keys,
                             w.keys,
                             shared.new_key[0],
                             shared.new_key[1],
                             pages(p.by_page, problem.k, problem.v)};
  copy_ended_block(p, w, cache, shared);
  ptx::copy_async_commit();
  std::uint32_t q[kHead / 16][4];
  {
    const Source<kPaged> pooled{problem.k_pooled.at(batch, 0, w.h),
                                problem.g_cmp.given ? problem.v_pooled.at(batch, 0, w.h) : nullptr,
                                problem.k_pooled.stride_s * 2,
                                problem.v_pooled.stride_s * 2,
                                w.step.completes ? w.complete - 1 : w.complete,
                                w.complete,
                                shared.new_pooled[0],
                                shared.new_pooled[1],
                                pages(p.by_pooled_page, problem.k_pooled, problem.v_pooled)};
    const bool of_window = warp >= w.cmp_warps;
    const Source<kPaged> from = of_window ? cache : pooled;
    const Share share = of_window ? Share(w, warp - w.cmp_warps, kWarps - w.cmp_warps, w.swa_tiles)
                                  : Share(w, warp, w.cmp_warps, w.cmp_tiles);
    const int first = of_window ? w.swa_first : 0;
    const auto first_row = [&](int n) { return first + (share.begin + n * share.step) * kTileKeys; };
    Walk<T, kHead, kPaged, decltype(first_row)> walk(problem, shared.ring[warp], from, share.count, first_row);
    walk.begin();
    if (gate_at.there) shared.gate[gate_at.branch][gate_at.row] = gate;
    if (thread < kMostSlots) {
      shared.best[thread] = 0;
      shared.list[thread] = -1;
    }
    ptx::copy_async_wait<kStages - 1>();  // what came before begin()
    __syncthreads();                      // 1
    append(p, w, shared);
    if (w.pools()) {
      pool<T>(p, w, shared);
      __syncthreads();  // 1b
    }
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
  const Forced forced(problem, w.keys - 1, p.block_log2);
  const int slots = static_cast<int>(problem.slots), taken = min(forced.count, slots), free = slots - taken;
  // Tiles of the selected branch go to warps in turn, those of forced blocks first.
  const int tiles_log2 = p.block_log2 - 4;  // of a block
  const auto row_of = [&](int block, int tile) {
    return (block << p.block_log2) + (tile & ((1 << tiles_log2) - 1)) * kTileKeys;
  };
  int loaded = 0;
  {
    const Share share(w, warp, kWarps, w.keys > 0 ? taken << tiles_log2 : 0);
#pragma unroll 1
    for (; loaded < min(share.count, kStages - 1); ++loaded) {
      const int tile = share.begin + loaded * share.step;
      load_tile<kHead>(problem, cache, row_of(forced.at(tile >> tiles_log2), tile), shared.ring[warp][loaded]);
    }
    ptx::copy_async_commit();
  }
  ScoresOfWarp scores_of_warp(p, w, scores);
  if (thread < kRows) shared.lse[thread] = thread < problem.G ? lse_of(w, shared, thread) : INFINITY;
  __syncthreads();  // 4
  Key mine = best_of(scores_of_warp, w, shared.lse, forced, free);
  shared.lists[warp][lane] = mine;
  __syncthreads();  // 5
  if (mine != 0) {
    const int place = place_among(shared.lists, kWarps, mine);
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
    const int place = place_among(shared.lists, w.ctas, mine);
    if (place < free) shared.list[taken + place] = block_of(mine);
  }
  if (thread < taken) shared.list[thread] = forced.at(thread);
  __syncthreads();  // 8
  Result<kHead> result(problem, w);
  {
    // A row without keys lists what is not there.
    const int count = w.keys > 0 ? __popc(__ballot_sync(kAll, shared.list[lane] >= 0)) : 0;
    const Share share(w, warp, kWarps, count << tiles_log2);
    const auto first_row = [&](int n) {
      const int tile = share.begin + n * share.step;
      return row_of(shared.list[tile >> tiles_log2], tile);
    };
    Walk<T, kHead, kPaged, decltype(first_row)> walk(problem, shared.ring[warp], cache, share.count, first_row);
    walk.begin(loaded);
    // The other branches' sums, while the first tiles come.
    result.add(problem, w, shared, kCmp, kSlc);
    walk.run(q, p.scale_log2, {});
    leave_result(shared, walk);
  }
  __syncthreads();  // 9
  join_warps(shared, kSlc, 0, kWarps);
  w.meet();  // 10
  result.add(problem, w, shared, kSlc, kBranches);
  result.template write<T>(p, w);
  w.meet();  // 11
}

}  // namespace heddle::cuda::sm90::nsa_step

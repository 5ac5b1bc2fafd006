// The best blocks: 32 of a warp's, then of the CTA's, then of the cluster's. Lists are in falling order and end in
// zeros.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/nsa_step/work.cuh"

namespace heddle::cuda::sm90::nsa_step {

using sparse::block_of;
using sparse::merged;
using sparse::sorted;

__device__ __forceinline__ Key key_of(float score, int block) {
  return sparse::key_of(__float_as_uint(score) + 1, block);
}

// The place of a lane's key among those of the first `count` lists, one of which has it at that lane, and whose keys
// are all different: how many of each list are better. The lists are halved side by side, as each step waits for the
// one before.
__device__ __forceinline__ int place_among(const Key (&lists)[kWarps][kWarp], int count, Key key) {
  int better[kWarps] = {};
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int n = 0; n < kWarps; ++n) better[n] += lists[n][better[n] + step - 1] > key ? step : 0;
  }
  int place = 0;
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    if (n < count) place += better[n] + (lists[n][better[n]] > key ? 1 : 0);  // 31 at most so far
  }
  return place;
}

// The forced blocks of the row at position t, each once, ascending.
struct Forced {
  int block[3] = {-1, -1, -1}, count = 0;

  __device__ Forced(const NsaStepProblem& problem, int t, int block_log2) {
    const int current = t >> block_log2;
    if (problem.forced.first) add(0);
    if (problem.forced.previous) add(current - 1);
    if (problem.forced.current) add(current);
  }
  __device__ int at(int n) const { return n == 0 ? block[0] : n == 1 ? block[1] : block[2]; }
  __device__ bool holds(int other) const { return other == block[0] || other == block[1] || other == block[2]; }

 private:
  // Blocks come in rising order, and so without memory that is addressed.
  __device__ void add(int other) {
    if (other < 0 || holds(other)) return;
    (count == 0 ? block[0] : count == 1 ? block[1] : block[2]) = other;
    ++count;
  }
};

// Scores that a CTA's warps have written, of the pooled keys that this warp chooses among: two tiles of the CTA's at a
// time, a key each lane, of which the next are on their way while those before are used.
struct ScoresOfWarp {
  const float* data;  // [G][pitch], in log2 units; global memory, which this CTA wrote, and a barrier has ordered
  int pitch, group;
  int tiles, next;  // of the CTA
  int block;        // of this lane
  float of[kRows] = {};

  __device__ ScoresOfWarp(const Params& p, const Work& w, const float* data)
      : data(data),
        pitch(p.score_pitch),
        group(static_cast<int>(p.problem.G)),
        tiles(w.cmp_tiles > w.rank ? divided_up(w.cmp_tiles - w.rank, w.ctas) : 0),
        next(static_cast<int>(threadIdx.x) / kWarp * 2) {
    load(w);
  }
  __device__ bool any() const { return next < tiles; }
  __device__ void advance(const Work& w) {
    next += 2 * kWarps;
    load(w);
  }

 private:
  __device__ __forceinline__ void load(const Work& w) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    block = ((next + lane / kTileKeys) * w.ctas + w.rank) * kTileKeys + lane % kTileKeys;
    if (!any()) return;
    const float* const from = data + min(block, w.complete - 1);
    constexpr int kAtOnce = 4;  // without a branch between them
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      if (first >= group) break;
#pragma unroll
      for (int g = first; g < first + kAtOnce; ++g) of[g] = from[min(g, group - 1) * pitch];
    }
  }
};

// The best blocks of a warp's share, over its lanes. lse: log2, and infinite for rows that are no head of the group.
__device__ __forceinline__ Key best_of(ScoresOfWarp& scores, const Work& w, const float (&lse)[kRows],
                                       const Forced& forced, int free) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Key kept = 0, worst = 0;
  if (free <= 0) return 0;
#pragma unroll 1
  while (scores.any()) {
    const int block = scores.block;
    float score = 0.0f;
#pragma unroll
    for (int g = 0; g < kRows; ++g) score += ptx::exp2_approx(scores.of[g] - lse[g]);
    scores.advance(w);
    const bool may = block < w.complete && !forced.holds(block) && !isnan(score);
    const Key comes = may ? key_of(score, block) : 0;
    if (!__any_sync(kAll, comes > worst)) continue;
    const bool first = !__any_sync(kAll, kept != 0);
    const Key falling = sorted(comes, lane);
    // The larger of a falling and a rising run, place by place, are the best of both, as a run that rises and falls.
    kept = first ? falling : merged(max(kept, __shfl_sync(kAll, falling, kWarp - 1 - lane)), lane);
    worst = __shfl_sync(kAll, kept, free - 1);
  }
  return kept;
}

}  // namespace heddle::cuda::sm90::nsa_step

// What a CTA has to do, and what of it each warp.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/sm90/nsa_step/memory.cuh"

namespace heddle::cuda::sm90::nsa_step {

__device__ __forceinline__ int divided_up(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ const Plane& gate_of(const NsaStepProblem& problem, int branch) {
  return branch == kCmp ? problem.g_cmp : branch == kSwa ? problem.g_swa : problem.g_slc;
}

struct Work {
  NsaStepProblem::Step step;
  int unit, b, h;  // h: key/value head
  int rank, ctas;  // of the cluster
  int keys, complete;
  int cmp_tiles, swa_tiles, swa_first;
  int cmp_warps;  // of each CTA, the first ones; the others have the window

  // Which sequence and head: all that q needs.
  __device__ explicit Work(const Params& p) {
    ctas = p.cluster;
    rank = ctas > 1 ? ptx::cluster_rank() : 0;
    unit = static_cast<int>(blockIdx.x) / ctas;
    b = unit / static_cast<int>(p.problem.H);
    h = unit - b * static_cast<int>(p.problem.H);
  }
  // The rest, by the sequence's length, which comes from memory.
  __device__ void find_tiles(const Params& p) {
    step = p.problem.step(b, p.block_log2);
    keys = static_cast<int>(step.keys), complete = static_cast<int>(step.complete);
    const int window = static_cast<int>(min(p.problem.window, step.keys));
    cmp_tiles = divided_up(complete, kTileKeys);
    swa_first = keys - window;
    swa_tiles = p.problem.g_swa.given ? divided_up(window, kTileKeys) : 0;
    // Warps in the ratio of tiles, at least one for each branch that has some. 2^31 keys have less than 2^27 + 2^23.
    const unsigned tiles = static_cast<unsigned>(cmp_tiles + swa_tiles);
    cmp_warps = swa_tiles == 0 ? kWarps
                : cmp_tiles == 0
                    ? 0
                    : max(1, min(kWarps - 1, static_cast<int>((2 * kWarps * static_cast<unsigned>(cmp_tiles) + tiles) /
                                                              (2 * tiles))));
  }
  // The step's key ends a block, whose pooled key is in one of this CTA's tiles.
  __device__ bool pools() const { return step.completes && (complete - 1) / kTileKeys % ctas == rank; }

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

}  // namespace heddle::cuda::sm90::nsa_step

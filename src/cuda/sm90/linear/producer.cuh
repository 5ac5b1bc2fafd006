// The thread that brings weights and x, stage by stage.
#pragma once

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/linear/params.h"

namespace heddle::cuda::sm90::linear {

using cuda::linear::Part, cuda::linear::part_of;

constexpr int kPanelBytes = 128;  // of a row of x, the width of the swizzle

// The units of this CTA, one after the other.
template <class C>
struct Cursor {
  int number = 0, unit;
  Part part;
  __device__ explicit Cursor(const Schedule& s) : part(part_of<C>(s, 0)) { unit = part.begin; }
  __device__ bool done() const { return part.begin == part.end; }
  __device__ void next(const Schedule& s) {
    if (++unit < part.end) return;
    part = part_of<C>(s, ++number);
    unit = part.begin;
  }
};

// One thread. Weights may come before the grid before this one has ended; x may be what that one writes.
template <class C, class Shared>
__device__ inline void produce(const Params<typename C::WeightBlock>& p, Shared& shared) {
  using WeightBlock = typename C::WeightBlock;
  constexpr int kPanels = C::kUnitBlocks * C::kBlockPanels;
  const Schedule& s = p.schedule;
  const int panel_bytes = p.x_rows * kPanelBytes;
  const auto load_weights = [&](const Cursor<C>& at, int n) {
    constexpr int kBytes = sizeof(WeightBlock);
    const int first = at.unit * C::kUnitBlocks, blocks = min(C::kUnitBlocks, s.k_blocks - first);
    ptx::barrier_arrive_expect(shared.ready[n], kPanels * panel_bytes + C::kTileBlocks * C::kUnitBlocks * kBytes);
#pragma unroll 1
    for (int r = 0; r < C::kTileBlocks; ++r) {
      // Behind the last rows these once more, for nothing; behind the last columns the first of the unit: x is zero
      // there, but must not meet an infinity that shared memory may hold.
      const std::int64_t row_block = min(at.part.row_block + r, s.row_blocks - 1);
      const WeightBlock* const from = p.weights + (row_block * s.k_blocks + first);
      ptx::bulk_load(&shared.weights[n][r], from, blocks * kBytes, shared.ready[n]);
#pragma unroll 1
      for (int i = blocks; i < C::kUnitBlocks; ++i) {
        ptx::bulk_load(&shared.weights[n][r][i], from, kBytes, shared.ready[n]);
      }
    }
  };
  const auto load_x = [&](const Cursor<C>& at, int n) {
    if (p.x_by_panel) {
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load_4d(reinterpret_cast<std::byte*>(shared.x[n]) + panel * panel_bytes, p.x, shared.ready[n],
                         (at.unit * kPanels + panel) * C::kPanelColumns, at.part.token, 0, 0, ptx::L2::evict_last);
      }
    } else {
      ptx::tma_load_4d(shared.x[n], p.x, shared.ready[n], 0, at.part.token, at.unit * kPanels, 0, ptx::L2::evict_last);
    }
  };

  Cursor<C> ahead(s);
  int stages = 0;
#pragma unroll 1
  for (; stages < C::kStages && !ahead.done(); ahead.next(s)) load_weights(ahead, stages++);
  wait_for_previous_grid();
  Cursor<C> at(s);
#pragma unroll 1
  for (int n = 0; n < stages; ++n, at.next(s)) load_x(at, n);
  RingPosition<C::kStages> stage;
#pragma unroll 1
  for (; !at.done(); at.next(s), stage.next()) {
    await_free(shared.free[stage.index], stage.phase ^ 1);  // the first round did not wait
    load_weights(at, stage.index);
    load_x(at, stage.index);
  }
}

}  // namespace heddle::cuda::sm90::linear

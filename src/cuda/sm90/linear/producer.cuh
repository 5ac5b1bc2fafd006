// The thread that brings weights and x, stage by stage.
#pragma once

#include "cuda/common/overlap.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/sm90/linear/schedule.cuh"

namespace heddle::cuda::sm90::linear {

// Where in a ring of stages one is.
struct Position {
  int index = 0;
  std::uint32_t phase = 0;
  template <int kStages>
  __device__ void next() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

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

// Brings the weights of a unit; `ready` gets kTileBlocks times kUnitBlocks of them.
template <class C>
__device__ inline void load_weights(const Params<typename C::WeightBlock>& p, const Cursor<C>& at,
                                    typename C::WeightBlock (&to)[C::kTileBlocks][C::kUnitBlocks],
                                    ptx::Barrier& ready) {
  using WeightBlock = typename C::WeightBlock;
  constexpr int kBytes = sizeof(WeightBlock);
  const Schedule& s = p.schedule;
  const int first = at.unit * C::kUnitBlocks, blocks = min(C::kUnitBlocks, s.k_blocks - first);
#pragma unroll 1
  for (int r = 0; r < C::kTileBlocks; ++r) {
    // Behind the last rows these once more, for nothing; behind the last columns the first of the unit: x is zero
    // there, but must not meet an infinity that shared memory may hold.
    const std::int64_t row_block = min(at.part.row_block + r, s.row_blocks - 1);
    const WeightBlock* const from = p.weights + (row_block * s.k_blocks + first);
    ptx::bulk_load(&to[r], from, blocks * kBytes, ready);
#pragma unroll 1
    for (int i = blocks; i < C::kUnitBlocks; ++i) ptx::bulk_load(&to[r][i], from, kBytes, ready);
  }
}

// x: a stage, panel after panel.
template <class C, class Stage>
__device__ inline void load_x(const Params<typename C::WeightBlock>& p, const Cursor<C>& at, Stage& to,
                              ptx::Barrier& ready) {
  constexpr int kPanels = C::kUnitBlocks * C::kBlockPanels;
  if (p.x_by_panel) {
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load_4d(to[panel], p.x, ready, (at.unit * kPanels + panel) * C::kPanelColumns, at.part.token, 0, 0,
                       ptx::L2::evict_last);
    }
  } else {
    ptx::tma_load_4d(to, p.x, ready, 0, at.part.token, at.unit * kPanels, 0, ptx::L2::evict_last);
  }
}

// One thread. Weights may come before the grid before this one has ended; x may be what that one writes.
template <class C, class Shared>
__device__ inline void produce(const Params<typename C::WeightBlock>& p, Shared& shared) {
  const Schedule& s = p.schedule;
  const auto weights = [&](const Cursor<C>& at, int n) {
    ptx::barrier_arrive_expect(shared.ready[n], sizeof(shared.x[0]) + sizeof(shared.weights[0]));
    load_weights(p, at, shared.weights[n], shared.ready[n]);
  };
  Cursor<C> ahead(s);
  int stages = 0;
#pragma unroll 1
  for (; stages < C::kStages && !ahead.done(); ahead.next(s)) weights(ahead, stages++);
  wait_for_previous_grid();
  Cursor<C> at(s);
#pragma unroll 1
  for (int n = 0; n < stages; ++n, at.next(s)) load_x(p, at, shared.x[n], shared.ready[n]);
  Position stage;
#pragma unroll 1
  for (; !at.done(); at.next(s), stage.next<C::kStages>()) {
    ptx::barrier_wait(shared.free[stage.index], stage.phase);
    weights(at, stage.index);
    load_x(p, at, shared.x[stage.index], shared.ready[stage.index]);
  }
}

}  // namespace heddle::cuda::sm90::linear

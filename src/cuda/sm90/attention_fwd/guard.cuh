// The guard: a warp that keeps values which no row of a tile attends out of P V. P is zero there, but zero times NaN is
// NaN, and so is zero times infinity.
//
// Values outside a tile's band are always cleared (sm90/attention/guard.cuh). Values that only a bias or mask removes
// are nearly always finite, so the first time a tile is computed nobody looks at them. Where its O comes out as NaN,
// the tile is computed again as a careful one, and the guard looks at every value.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention/finite.cuh"
#include "cuda/sm90/attention/guard.cuh"
#include "cuda/sm90/attention_fwd/terms.cuh"

namespace heddle::cuda::sm90::attention_fwd {

using attention::AttendedRows;
using attention::not_finite;
using attention::passes_guard;

// Whether any row of the tile attends this key, by band, bias and mask. The whole warp.
template <class C>
__device__ bool anyone_attends(const Params& p, const Work& w, int key) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool attends = false;
#pragma unroll 1
  for (int row = lane; row < C::kConsumers * kRows; row += 32) {
    const ThreadRows at{w.position + row / kRows * p.positions, row % kRows};
    const int position = at.position(p, 0), i = position + w.off;
    if (at.lane_row >= p.positions * p.pack || position >= w.used_rows || key < i - p.left || key > i + p.right)
      continue;
    const auto open = [&](const ScorePlane& plane, bool is_mask) {
      if (plane.data == nullptr) return true;
      const std::int64_t offset[1] = {plane_offset(plane, p, w, at, key)};
      float value[1];
      load_elements<typename C::Element>(plane, is_mask, p.bias_is_float, offset, value);
      return value[0] != -INFINITY;
    };
    attends |= open(p.bias, false) && open(p.mask, true);
  }
  return __any_sync(0xffffffff, attends);
}

// Clears those rows of [from, to) that hold a NaN or an infinity and that nobody attends. The whole warp.
template <class C, class Tile>
__device__ void clear_unattended(const Params& p, const Work& w, Tile& tile, int first_key, int from, int to) {
  using T = typename C::Element;
  constexpr int kChunks = sizeof(tile.panel[0][0]) / sizeof(uint4);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Most tiles are finite, and one pass over all of a tile shows it.
  std::uint32_t found = 0;
#pragma unroll 1
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const auto* chunks = reinterpret_cast<const uint4*>(tile.panel[panel]);
#pragma unroll 4
    for (int i = lane; i < C::kTileK * kChunks; i += 32) found |= not_finite<T>(chunks[i]);
  }
  if (!__any_sync(0xffffffff, found != 0)) return;
#pragma unroll 1
  for (int row = from; row < to; ++row) {
    found = 0;
#pragma unroll 1
    for (int i = lane; i < Tile::kPanels * kChunks; i += 32) {
      found |= not_finite<T>(reinterpret_cast<const uint4*>(tile.panel[i / kChunks][row])[i % kChunks]);
    }
    if (!__any_sync(0xffffffff, found != 0) || anyone_attends<C>(p, w, first_key + row)) continue;
    __syncwarp();  // all lanes have read the row before any clears it
    clear_rows(tile, row, row + 1);
  }
}

// Waits for one tile of v, if it passes the guard at all, clears rows of it, and announces it to the consumers. The
// whole warp.
template <class C>
__device__ __forceinline__ void guard_values(const Params& p, const TileWork<typename C::Walk>& w,
                                             SharedMemory<C>& shared, int step) {
  const int tile = w.walk.index(step), stage = static_cast<int>(w.number_of(step) % C::kStages);
  if (!passes_guard<C>(p, w, tile)) return;
  const std::uint32_t phase = shared.v_phase[stage];
  __syncwarp();
  ptx::barrier_wait(shared.v_landed[stage], phase);
  if (threadIdx.x % 32 == 0) shared.v_phase[stage] = phase ^ 1;
  const AttendedRows<C> rows(w, tile);
  clear_rows(shared.v[stage], 0, min(rows.begin, C::kTileK));
  clear_rows(shared.v[stage], rows.end, C::kTileK);
  if constexpr (C::kRemovesPairs) {
    __syncwarp();  // clear_unattended() reads rows that other lanes have just cleared
    if (w.careful) clear_unattended<C>(p, w, shared.v[stage], tile * C::kTileK, rows.begin, rows.end);
  }
  ptx::fence_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.v_ready[stage]);
}

// Writes down which keys of a tile are closed, and what is added to their scores, for the consumers: of step n in place
// n % kKeyTiles, where that of step n - 4 was. It is free: the call for step n - 1 has waited until the k of step n - 3
// was given back (there are two stages), and who gives that back is done with step n - 4.
template <class C>
__device__ __forceinline__ void serve_keys(const Params& p, const TileWork<typename C::Walk>& w,
                                           SharedMemory<C>& shared, int step) {
  const unsigned n = w.number_of(step);
  KeyTileValues<C>(p, w, w.walk.index(step)).write(shared, static_cast<int>(n % kKeyTiles));
  ptx::fence_async_shared();
  ptx::barrier_wait(shared.k_free[n % C::kStages], ~(n / C::kStages) & 1);
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.k_ready[n % C::kStages]);
}

// The whole warp. In the producer's order: k runs one step ahead of v.
template <class C>
__device__ void guard_tiles(const Params& p, SharedMemory<C>& shared) {
  constexpr int kAhead = C::kHasKeyTerms || C::kHasBulkPlane ? 1 : 0;
  unsigned works = 0;  // tiles done so far. Position and phase in the ring follow from it: registers are few
#pragma unroll 1
  for (;; ++works) {
    ptx::barrier_wait(shared.work_ready[works % kWorkSlots], works / kWorkSlots & 1);
    const TileWork<typename C::Walk>& w = shared.work[works % kWorkSlots];
    if (w.position == kNoMoreTiles) return;
#pragma unroll 1
    for (int step = w.walk.steps().end - 1; step >= w.walk.steps().begin - kAhead; --step) {
      if constexpr (kAhead > 0) {
        if (has_key_values<C>(p) && step >= w.walk.steps().begin) serve_keys<C>(p, w, shared, step);
      }
      if (step + kAhead == w.walk.steps().end) continue;
      guard_values<C>(p, w, shared, step + kAhead);
    }
    __syncwarp();
    ptx::barrier_arrive(shared.work_free[recomputed(static_cast<int>(works)) % kWorkSlots]);
  }
}

}  // namespace heddle::cuda::sm90::attention_fwd

// What a consumer warp holds while a piece lasts: its place in the unit, q, O and the rows' statistics.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_decode/scores.cuh"

namespace heddle::cuda::sm90::attention_decode {

// Which head, rows and keys of a unit are a warp's. Warps of a warpgroup that multiplies as one are neighbours along
// the rows; else warps that share keys are neighbours.
template <class C>
struct Place {
  int head, row_group, split;
  __device__ Place(const Plan& plan, int number)
      : head(number / (plan.row_groups * plan.key_splits)),
        row_group(C::kWarpgroups ? number % plan.row_groups : number / plan.key_splits % plan.row_groups),
        split(C::kWarpgroups ? number / plan.row_groups % plan.key_splits : number % plan.key_splits) {}
  // Among the warps as the merge counts them: those that shared a row's keys side by side.
  __device__ int merge_index(const Plan& plan) const {
    return (head * plan.row_groups + row_group) * plan.key_splits + split;
  }
};

template <class C>
class Fragments {
 protected:
  using T = typename C::Element;
  static constexpr int kTiles = C::kRowTiles, kSteps = C::kSize / 16, kColumns = C::kSize / 8;

  __device__ Fragments(const Params& params, SharedMemory<C> memory, const Place<C>& place)
      : p(params),
        shared(memory),
        control(memory.control()),
        head(place.head),
        first_row(place.row_group * (kRowTile * kTiles)),
        split(place.split),
        warp(place.merge_index(params.plan)) {}

  static __device__ int lane() { return recomputed(static_cast<int>(threadIdx.x)) % 32; }

  // This warp's part of the merge buffer, idle while it attends.
  __device__ float* merge_rows() const { return shared.merge() + warp * C::kMergeWords; }

  // Loads q of row tile m, for all steps (in registers) or for one. Rows beyond the last read the last one's: their
  // results are thrown away.
  __device__ void load_q(int m, int step) {
    const int row = head % p.plan.heads * p.plan.rows + min(first_row + kRowTile * m + lane() % 16, p.plan.rows - 1);
    const std::uint32_t address = ptx::shared_address(shared.q()) + row * C::kQPitch + lane() / 16 * 16;
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) ptx::load_matrix_x4(q[n], address + 32 * n);
    } else {
      ptx::load_matrix_x4(q[0], address + 32 * step);
    }
  }

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
  const int head, first_row;  // of the unit's kv heads, and the warp's first row of that
  const int split, warp;      // its share of the keys; its place in the merge
  RowState state[kTiles];
  float factor[2 * kTiles];  // of the scores of this thread's rows; e4m3 only
  float value_unit[kTiles];  // O counts in these; 1 unless scales differ from key to key
  float o[kTiles][kColumns][4];
  std::uint32_t q[C::kQInRegisters ? kSteps : 1][4];
};

}  // namespace heddle::cuda::sm90::attention_decode

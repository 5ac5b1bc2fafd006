// A warp that attends: takes pieces one after the other, computes their blocks alone (warp_blocks.cuh) or with the rest
// of its warpgroup (warpgroup_blocks.cuh), and hands over what came out. Warps share no maxima or sums until a piece
// ends.
#pragma once

#include <type_traits>

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_decode/merge.cuh"
#include "cuda/sm90/attention_decode/warp_blocks.cuh"
#include "cuda/sm90/attention_decode/warpgroup_blocks.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
using Blocks = std::conditional_t<C::kWarpgroups, WarpgroupBlocks<C>, WarpBlocks<C>>;

template <class C>
class Consumer : Blocks<C> {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C> memory, int number)
      : Base(params, memory, Place<C>(params.plan, number)) {}

  __device__ void run() {
    Merger<C> merger(p, shared);
    const Piece* last = nullptr;  // of a unit that began in an earlier CTA: merged when all else is done
    std::uint32_t phase = 0;
    for (RingPosition<kPieces> slot;; slot.next(), phase ^= 1) {
      ptx::barrier_wait(control.piece_ready[slot.index], slot.phase);
      const Piece& piece = control.pieces[slot.index];
      const bool more = piece.sequence >= 0;
      const Piece* merge = last;
      if (more) {
        clear();
        ptx::barrier_wait(control.q_ready, phase);
        load_factors();
        if constexpr (C::kQInRegisters) {
          this->load_q(0, 0);
          release_after_own_reads(control.q_free);
        }
        this->attend(piece);
        finish(piece, merger);
        if (piece.merge == Piece::kCluster) merger.gather(piece);
        if constexpr (!C::kQInRegisters) ptx::barrier_arrive(control.q_free);  // for query warps, which store
        merge = piece.merge == Piece::kNow ? &piece : nullptr;
        if (piece.merge == Piece::kLast) {
          if (warp == 0 && lane() == 0) control.last = piece;
          last = &control.last;
        }
      }
      consumers_meet();  // for control.last
      if (merge != nullptr) merger.merge(*merge);
      if (!more) return;
      release_to_stores(control.piece_free[slot.index]);
    }
  }

 private:
  using Base = Blocks<C>;
  using Base::control, Base::factor, Base::first_row, Base::head, Base::kColumns, Base::kTiles, Base::lane, Base::o,
      Base::p, Base::shared, Base::state, Base::value_unit, Base::warp;

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      state[m] = {};
      value_unit[m] = C::kKeyScales ? 0x1p-126f : 1.0f;  // a normal number: it is divided by
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
      }
    }
  }

  __device__ void load_factors() {
    if constexpr (C::kE4m3) {
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const int row = min(first_row + 8 * n + lane() / 4, p.plan.rows - 1);
        factor[n] = control.row_factor[head % p.plan.heads * p.plan.rows + row];
      }
    }
  }

  // Hands O, maxima and sums to the merge of the warps that shared the keys.
  __device__ void finish(const Piece& piece, Merger<C>& merger) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = sum_of_quad(state[m].sum[r]);
        if (lane() % 4 == 0) {
          control.max[warp][kRowTile * m + 8 * r + lane() / 4] = state[m].max[r];
          control.sum[warp][kRowTile * m + 8 * r + lane() / 4] = sum;
        }
      }
    }
    // Eight rows and kPassColumns columns at a time. The loop over `other` picks them by comparison, since registers
    // cannot be indexed.
    constexpr int kPasses = C::kSize / C::kPassColumns, kColumnsOfPass = C::kPassColumns / 8;
#pragma unroll 1
    for (int part = 0; part < 2 * kTiles * kPasses; ++part) {
      const int row = part / kPasses * 8, pass = part % kPasses;
      if (row >= p.plan.rows) break;  // no warp has rows here
      const int lane = Base::lane();
      float* to = this->merge_rows() + lane / 4 * C::kMergePitch;
#pragma unroll
      for (int n = 0; n < kColumnsOfPass; n += 2) {
        float2 even = make_float2(0.0f, 0.0f), odd = even;
#pragma unroll
        for (int other = 0; other < 2 * kTiles * kPasses; ++other) {
          const int m = other / kPasses / 2, r = other / kPasses % 2, column = other % kPasses * kColumnsOfPass + n;
          if (other == part) {
            even = make_float2(o[m][column][2 * r], o[m][column][2 * r + 1]);
            odd = make_float2(o[m][column + 1][2 * r], o[m][column + 1][2 * r + 1]);
          }
        }
        if constexpr (C::kE4m3) {
          const float unit = kTiles == 2 && row >= kRowTile ? value_unit[kTiles - 1] : value_unit[0];
          *reinterpret_cast<float4*>(to + 8 * n + 4 * (lane % 4)) =
              make_float4(even.x * unit, odd.x * unit, even.y * unit, odd.y * unit);
        } else {
          *reinterpret_cast<float2*>(to + 8 * n + 2 * (lane % 4)) = even;
          *reinterpret_cast<float2*>(to + 8 * n + 8 + 2 * (lane % 4)) = odd;
        }
      }
      consumers_meet();
      merger.join_warps(piece, row, pass * C::kPassColumns);
      consumers_meet();
    }
  }
};

}  // namespace heddle::cuda::sm90::attention_decode

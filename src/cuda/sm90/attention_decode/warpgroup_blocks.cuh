// A warpgroup's blocks: S = Q K^T, softmax, O += P V with 64 rows and 64 keys of one kv head at a time. K and V are
// read where the copies put them, once for all rows; P, O and, up to D 128, q are in registers, 16 rows a warp.
//
// A block is one product for each warpgroup: both have halves of its keys, or a kv head each, or 64 rows each.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_decode/fragments.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class WarpgroupBlocks : protected Fragments<C> {
 protected:
  using Base = Fragments<C>;
  using Base::control, Base::first_row, Base::head, Base::kColumns, Base::kSteps, Base::lane, Base::o, Base::p, Base::q,
      Base::shared, Base::split, Base::state;
  using typename Base::T;

  __device__ WarpgroupBlocks(const Params& params, SharedMemory<C> memory, const Place<C>& place)
      : Base(params, memory, place) {
    v.next(p.plan.stages);
  }

  // Two products are in flight: P V of a block runs beside the softmax of the next.
  __device__ void attend(const Piece& piece) {
    if (head >= p.plan.heads) return pass(piece.blocks);
    if (piece.blocks == 0) return;
    int first_key = piece.first_slot - piece.k_begin + split * kGroupKeys;
#pragma unroll 1
    for (int block = 0; block < piece.blocks; ++block, first_key += p.plan.block) {
      issue_scores();
      // In the first step there are no values yet, as P V runs a block behind: keys stand in for them, and their
      // product is thrown away.
      issue_values(block == 0 ? k.index : v.index, block == 0 ? k.phase : v.phase, block > 1);
      wgmma_wait<1>();
      keep(flat(s));
      release_after_products(control.empty[k.index]);
      advance(k);
      const bool whole = p.plain && first_key >= piece.whole_begin && first_key + kGroupKeys <= piece.whole_end;
      finish_scores(piece, first_key, whole);
      float correction[2];
      softmax(s, state[0], correction);
      keep(flat(s));
      // Each branch waits for P V itself: a single wait in front of it would be moved up to before the softmax.
      if (__any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f)) {
        wgmma_wait<0>();
        keep(flat(o[0]));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) o[0][n][c] *= correction[c / 2];
        }
      } else {
        wgmma_wait_without_rescale();
        keep(flat(o[0]));
      }
      if (block > 0) release_values();
      if (!whole) clear_values();
#pragma unroll
      for (int i = 0; i < kGroupKeys / 4; ++i) {
        probabilities[i / 4][i % 4] = ptx::pack2<T>(flat(s)[2 * i], flat(s)[2 * i + 1]);
      }
    }
    issue_values(v.index, v.phase, piece.blocks > 1);
    wgmma_wait<0>();
    keep(flat(o[0]));
    release_values();
  }

 private:
  using QK = Wgmma<T, kGroupKeys>;
  using PV = Wgmma<T, C::kSize>;

  template <int kCount>
  static __device__ auto& flat(float (&x)[kCount][4]) {
    return reinterpret_cast<float(&)[4 * kCount]>(x);
  }

  // From one block's tile of K, or of V, to the next's.
  __device__ void advance(DynamicRingPosition& tile) {
    tile.next(p.plan.stages);
    tile.next(p.plan.stages);
  }

  // Passes over blocks that hold nothing for this warpgroup.
  __device__ void pass(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      pass(k);
      pass(v);
    }
  }
  __device__ void pass(DynamicRingPosition& tile) {
    await_filled(control.full[tile.index], tile.phase);
    release_after_products(control.empty[tile.index]);
    advance(tile);
  }

  // The warpgroup's first key in a tile: its 64 rows of 128 bytes lie side by side. Where a copy brings fewer keys, a
  // unit has one head, and copies follow each other without a gap.
  __device__ int tile_row() const { return head * p.plan.box + split * kGroupKeys; }

  __device__ void issue_scores() {
    await_filled(control.full[k.index], k.phase);
    const Swizzled128 tile(shared.tile(k.index)), q_tile(shared.q());
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t keys = tile.at(step / 4 * p.plan.panel_bytes + tile_row() * kPanel + step % 4 * 32);
      if constexpr (C::kQSwizzled) {
        QK::shared_shared(flat(s), q_tile.at(step / 4 * (kGroupRows * kPanel) + step % 4 * 32), keys, step > 0);
      } else {
        QK::template registers_shared<false>(flat(s), q[step], keys, step > 0);
      }
    }
    wgmma_commit();
  }

  __device__ void issue_values(int stage, std::uint32_t phase, bool accumulate) {
    await_filled(control.full[stage], phase);
    if (stage == v.index) planted_release(Plant::late_key_reads, control.empty[stage]);
    const Swizzled128 tile(shared.tile(stage), p.plan.panel_bytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGroupKeys / 16; ++step) {
      PV::template registers_shared<true>(flat(o[0]), probabilities[step], tile.at((tile_row() + 16 * step) * kPanel),
                                          accumulate || step > 0);
    }
    wgmma_commit();
  }

  __device__ void release_values() {
    if (!planted(Plant::late_key_reads)) release_after_products(control.empty[v.index]);
    advance(v);
  }

  // Scale, options and masks; tells the others which keys this warp's rows attend, unless it is all of them.
  __device__ __forceinline__ void finish_scores(const Piece& piece, int first_key, bool whole) {
#pragma unroll
    for (int n = 0; n < kGroupKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] *= p.problem.scale;
    }
    if (whole) return;
    const TileRows rows(p, piece, piece.head + head, first_row);
    if (!p.plain) apply_options(p, piece, rows, first_key, this->merge_rows(), s);
    mask_band(rows, first_key, s);
    std::uint32_t attended = 0;
#pragma unroll
    for (int n = 0; n < kGroupKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (s[n][c] != -INFINITY || s[n][2 + c] != -INFINITY) attended |= 1u << (2 * n + c);
      }
    }
    attended = any_of_quads(attended);
    if (lane() < 4) control.attended[warp_number()][lane()] = attended;
  }

  // Values that no row attends become zeros: P is zero there, but zero times NaN is not. With every warp whose rows
  // meet these values; the next words are written when all have read these.
  __device__ void clear_values() {
    const int sharers = p.plan.row_groups, first_warp = warp_number() & -sharers;
    const int thread = recomputed(static_cast<int>(threadIdx.x)) & (32 * sharers - 1);
    ptx::barrier_wait(control.full[v.index], v.phase);
    meet(first_warp, sharers);
    const int key = thread % kGroupKeys;
    std::uint32_t attended = 0;
#pragma unroll 1
    for (int n = 0; n < sharers; ++n) attended |= control.attended[first_warp + n][key % 8 / 2];
    if ((attended >> (key / 8 * 2 + key % 2) & 1) == 0) {
      const std::uint32_t row = ptx::shared_address(shared.tile(v.index)) + (tile_row() + key) * kPanel;
#pragma unroll 1
      for (int chunk = thread / kGroupKeys; chunk < 8 * C::kPanels; chunk += 32 * sharers / kGroupKeys) {
        // In an order in which neighbouring keys differ in their banks.
        ptx::store_shared_16(row + chunk / 8 * p.plan.panel_bytes + ((chunk ^ key) & 7) * 16, make_uint4(0, 0, 0, 0));
      }
    }
    ptx::fence_async_shared();
    meet(first_warp, sharers);
  }

  // The number of this warp among the consumers.
  static __device__ int warp_number() { return (recomputed(static_cast<int>(threadIdx.x)) - kServiceThreads) / 32; }

  // The warps whose rows meet the same keys: all, or a warpgroup.
  static __device__ void meet(int first_warp, int sharers) {
    if (C::kSize <= 128 && sharers == kConsumerWarps) {
      consumers_meet();
    } else if (C::kSize > 128 || first_warp == 0) {  // above 128, one warpgroup does all
      ptx::barrier_sync<2, 128>();
    } else {
      ptx::barrier_sync<3, 128>();
    }
  }

  DynamicRingPosition k, v;  // tiles to come
  float s[kGroupKeys / 8][4];
  std::uint32_t probabilities[kGroupKeys / 16][4];
};

}  // namespace heddle::cuda::sm90::attention_decode

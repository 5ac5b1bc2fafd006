// A warpgroup that owns 64 query rows of each tile: S = Q K^T, softmax, O += P V.
//
// Two products are in flight: while the softmax of key tile n runs, P(n-1) V(n-1) does. The pipeline does not drain
// between query tiles either: while one tile's O is written, the first S of the next is computed.
#pragma once

#include <type_traits>

#include "cuda/common/attention/log2.h"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_fwd/bulk_plane.cuh"
#include "cuda/sm90/attention_fwd/epilogue.cuh"
#include "cuda/sm90/attention_fwd/score_options.cuh"
#include "cuda/sm90/attention_fwd/softmax.cuh"
#include "cuda/sm90/attention_fwd/spoiled.cuh"
#include "cuda/sm90/attention_fwd/terms.cuh"

namespace heddle::cuda::sm90::attention_fwd {

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    if (C::kTakesTurns && warpgroup == 1) end_turn();
    bool tile = next_work();
    if constexpr (!C::kRemovesPairs) {
      if (tile) compute_tiles();
    } else {
      for (;;) {
        if (tile) compute_tiles();
        const int position = shared.work[slot].position;
        if (position == kNoMoreTiles) return;
        if (position != kPause) compute_again();
        __syncwarp();
        ptx::barrier_arrive(shared.work_free[slot]);
        tile = next_work();
      }
    }
  }

 private:
  static constexpr int kTurn = 1, kRowTerms = 3;  // numbers of barriers, one a warpgroup
  using T = typename C::Element;
  using Walk = typename C::Walk;
  using QTile = Tile<T, kRows, C::kHeadSize>;
  using KTile = Tile<T, C::kTileK, C::kHeadSize>;
  using VTile = Tile<T, C::kTileK, C::kValueSize>;
  using QK = Wgmma<T, C::kTileK>;
  using PV = Wgmma<T, C::kValueSize>;
  using Units = std::conditional_t<C::kRemovesPairs, Biased, Shifted>;

  // Computes the tile at hand and all that follow, until next_work() returns false.
  __device__ __forceinline__ void compute_tiles() {
    take_q();
    begin_score_options();
    await_keys();
    begin_turn();
    issue_qk(steps_end() - 1);
    end_turn();
    load_score_options(steps_end() - 1);
    wgmma_wait<0>();
    float correction[2];
    state = {};
    softmax_of(steps_end() - 1, correction);
    round_probabilities();
    for (;;) {
      bool accumulate = false;
      for (int step = steps_end() - 2; step >= walk().steps().begin; --step) {
        await_keys();
        begin_turn();
        issue_qk(step);
        issue_pv(accumulate);
        end_turn();
        accumulate = true;
        load_score_options(step);
        wgmma_wait<1>();
        softmax_of(step, correction);
        keep(s);
        // Each branch waits for P V itself. A single wait in front of the branch would be moved up by the assembler, to
        // before the softmax, which would then no longer run beside P V.
        if (__any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f)) {
          wgmma_wait<0>();
          keep(o);
#pragma unroll
          for (int i = 0; i < C::kValueSize / 2; ++i) o[i] *= correction[i / 2 % 2];
        } else {
          wgmma_wait_without_rescale();
          keep(o);
        }
        release_v();
        round_probabilities();
      }
      const int done_slot = slot;
      const Work& done = shared.work[done_slot];
      const RowState sums = state;
      float inverse[2];
      if (!next_work()) {
        issue_pv(accumulate);
        finish_rows<!C::kRemovesPairs>(p, done, thread_rows(done), sums, inverse);
        wgmma_wait<0>();
        keep(o);
        if constexpr (C::kRemovesPairs) release_v();
        store_rows<C>(p, staging(), done, first_position(done), warp_row(), o, inverse);
        if constexpr (C::kRemovesPairs) {
          ask_again_if_spoiled(done_slot, sums);
          ptx::barrier_arrive(shared.work_free[done_slot]);
        }
        return;
      }
      take_q();
      begin_score_options();
      await_keys();
      begin_turn();
      issue_qk(steps_end() - 1);
      issue_pv(accumulate);
      end_turn();
      load_score_options(steps_end() - 1);
      wgmma_wait<1>();
      state = {};
      softmax_of(steps_end() - 1, correction);
      keep(s);
      finish_rows<!C::kRemovesPairs>(p, done, thread_rows(done), sums, inverse);
      wgmma_wait<0>();
      keep(o);
      release_v();
      store_rows<C>(p, staging(), done, first_position(done), warp_row(), o, inverse);
      ask_again_if_spoiled(done_slot, sums);
      ptx::barrier_arrive(shared.work_free[done_slot]);
      round_probabilities();
    }
  }

  // Computes a careful tile (docs/glossary.md), one product after the other. It is rare, so a loop of its own keeps the
  // registers that it needs out of compute_tiles(). q stays in shared memory: when it was loaded to registers in front
  // of this loop, ptxas 13.0 let P overwrite it.
  __device__ __forceinline__ void compute_again() {
    const TileWork<Walk>& w = shared.work[slot];
    await_q();
    begin_score_options();
    state = {};
    bool accumulate = false;
#pragma unroll 1
    for (int step = w.walk.steps().end - 1; step >= w.walk.steps().begin; --step) {
      await_keys();
      issue_qk<false>(step);
      load_score_options(step);
      wgmma_wait<0>();
      float correction[2];
      softmax_of<true>(step, correction);
      round_probabilities();
#pragma unroll
      for (int i = 0; i < C::kValueSize / 2; ++i) o[i] *= correction[i / 2 % 2];
      issue_pv(accumulate);
      accumulate = true;
      wgmma_wait<0>();
      keep(o);
      release_v();
    }
    float inverse[2];
    finish_rows<!C::kRemovesPairs>(p, w, thread_rows(w), state, inverse);
    store_rows<C>(p, staging(), w, first_position(w), warp_row(), o, inverse);
  }

  // With kTakesTurns two warpgroups issue their products in turn, so that those of one run beside the softmax of the
  // other.
  __device__ void begin_turn() {
    if constexpr (C::kTakesTurns) ptx::barrier_sync(kTurn + warpgroup, 256);
  }
  __device__ void end_turn() {
    if constexpr (C::kTakesTurns) ptx::barrier_arrive(kTurn + 1 - warpgroup, 256);
  }

  __device__ int first_position(const Work& w) const { return w.position + warpgroup * p.positions; }
  __device__ ThreadRows thread_rows(const Work& w) const { return {first_position(w), warp_row() + lane / 4}; }
  // The first of this warp's 16 rows of the warpgroup's 64.
  __device__ int warp_row() const { return recomputed(static_cast<int>(threadIdx.x)) % 128 / 32 * 16; }
  __device__ auto& staging() { return shared.o[4 * warpgroup + warp_row() / 16]; }
  __device__ auto& row_terms() { return shared.row_terms[C::kHasAlibiTerms ? warpgroup : 0]; }
  __device__ auto& planes() { return reinterpret_cast<PlaneTiles<C>&>(shared.planes[4 * warpgroup + warp_row() / 16]); }

  // Waits until the next tile is announced. False if it is not one to compute for the first time: there are no more, it
  // is a pause, or it is careful.
  __device__ bool next_work() {
    ptx::barrier_wait(shared.work_ready[announced % kWorkSlots], announced / kWorkSlots & 1);
    slot = static_cast<int>(announced++ % kWorkSlots);
    const TileWork<Walk>& work = shared.work[slot];
    kept_walk = work.walk;
    if (C::kRemovesPairs && work.careful) return false;
    return work.position >= 0;
  }

  __device__ void await_q() {
    await_filled(shared.q_ready[warpgroup], q_phase);
    q_phase ^= 1;
  }

  __device__ void take_q() {
    await_q();
    if constexpr (C::kQInRegisters) {
      const bool released = planted_release(Plant::late_query_reads, shared.q_free[warpgroup]);
      const int row = warp_row() + lane % 16;
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
        // 16-byte chunk c of row r lies at chunk c ^ (r % 8).
        const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
        ptx::load_matrix_x4(q[step], &shared.q[warpgroup].panel[step / 4][row][8 * chunk]);
      }
      if (!released) release_after_reads(shared.q_free[warpgroup]);
    }
  }

  // Waits for the next tile of keys, before Q K^T reads it. (keys_released: only ever set by a planted fault.)
  __device__ void await_keys() {
    if (!planted(Plant::unawaited_keys)) await_filled(shared.k_ready[k.index], k.phase);
    keys_released = planted_release(Plant::late_key_reads, shared.k_free[k.index]);
  }

  template <bool kInRegisters = C::kQInRegisters>
  __device__ void issue_qk(int step_of_walk) {
    const Swizzled128 k_tile(shared.k[k.index].panel), q_tile(shared.q[warpgroup].panel);
    const TileWork<Walk>& w = shared.work[slot];
    const Side side = side_of_keys<C>(p, w, first_position(w), w.walk.index(step_of_walk));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 16; ++step) {
      const int panel = step / 4, bytes = step % 4 * 32;
      const std::uint64_t b = k_tile.at(panel * KTile::kPanelBytes + bytes);
      if constexpr (kInRegisters) {
        QK::template registers_shared<false>(s, q[step], b, step > 0);
      } else {
        QK::shared_shared(s, q_tile.at(panel * QTile::kPanelBytes + bytes), b, step > 0);
      }
    }
    if constexpr (C::kHasTerms) {
      QK::shared_shared(s, unswizzled_columns(row_terms().columns[static_cast<int>(side)], kRows),
                        unswizzled_columns(shared.key_terms[w.number_of(step_of_walk) % kKeyTiles].columns, C::kTileK),
                        true);
    }
    wgmma_commit();
  }

  __device__ void issue_pv(bool accumulate) {
    await_filled(shared.v_ready[v.index], v.phase);
    const Swizzled128 v_tile(shared.v[v.index].panel, VTile::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      PV::template registers_shared<true>(o, probabilities[step], v_tile.at(step * 2048), accumulate || step > 0);
    }
    wgmma_commit();
  }

  __device__ void begin_score_options() {
    const TileWork<Walk>& w = shared.work[slot];
    if constexpr (C::kByElement) options.begin(p, planes(), w, first_position(w) + warp_row());
    if constexpr (C::kHasAlibiTerms) {
      if (p.alibi != nullptr) {
        write_row_terms<C>(p, row_terms(), w, first_position(w), warp_row(), kRowTerms + warpgroup);
      }
    }
  }

  __device__ void load_score_options(int step) {
    if constexpr (C::kByElement) {
      const TileWork<Walk>& w = shared.work[slot];
      options.load(p, w, thread_rows(w), w.walk.index(step));
    }
  }

  // Softmax of a key tile, once its S has been waited for. S is what reads k and, in the last step, q for the last
  // time, so both are given back here. kCareful: the tile of query rows is careful.
  template <bool kCareful = false>
  __device__ __forceinline__ void softmax_of(int step, float (&correction)[2]) {
    keep(s);
    if (planted(Plant::unawaited_keys)) ptx::barrier_wait(shared.k_ready[k.index], k.phase);
    if (!keys_released) release_after_products(shared.k_free[k.index]);
    k.next();
    if constexpr (!C::kQInRegisters || kCareful) {
      if (step == walk().steps().begin) release_after_products(shared.q_free[warpgroup]);
    }
    const TileWork<Walk>& w = shared.work[slot];
    const int tile = walk().index(step);
    if constexpr (C::kOptions == kSoftcap) {
      if (whole(step) && own(w) && small_for(p.softcap, s)) {
        softmax(s, state, correction, Capped{p.softcap.log2_series});
        return;
      }
    }
    Units units = {C::kRemovesPairs ? p.scale : p.scale_log2, {0.0f, 0.0f}};
    if constexpr (C::kByElement) {
      auto* scratch = reinterpret_cast<float*>(&staging());
      const float unit = options.apply(p, w, thread_rows(w), first_position(w) + warp_row(), step,
                                       whole(step) && own(w), planes(), scratch, s);
      units.scale = unit * (kLog2e / Units::kLog2);
    }
    if constexpr (C::kHasAlibiTerms) {
      if (p.alibi != nullptr) take_alibi(tile, units);
    }
    if constexpr (kCareful && C::kHasKeyTerms) {
      if (p.bias.access == PlaneAccess::keys) add_key_bias<C>(p, w, tile, units.scale, s);
    }
    if constexpr (C::kHasBulkPlane) take_plane(step, units);
    if (!whole(step)) mask_band<C>(p, w, thread_rows(w), tile, s);
    if constexpr (kCareful && C::kHasKeyTerms) {
      // The product has added -inf to the scores of closed keys. Where q or k hold NaN or infinity, the sum is not -inf
      // but NaN, so these scores are set to -inf once more.
      if (has_key_values<C>(p)) {
        remove_closed<C>(shared.closed_keys[w.number_of(step) % kKeyTiles][lane % 4], s);
      }
    }
    if constexpr (kCareful) {
      softmax(s, state, correction, Distant{units});
    } else if constexpr (C::kRemovesPairs || C::kHasAlibiTerms) {
      softmax<C::kRemovesPairs>(s, state, correction, units);
    } else {
      softmax(s, state, correction, Scaled{units.scale});
    }
  }

  // Whether every row of the tile exists in this sequence.
  __device__ bool own(const Work& w) const {
    return p.positions * p.pack == kRows && w.position + C::kConsumers * p.positions <= w.rows;
  }
  // Of the tile at hand, whose steps are taken from the last to the first.
  __device__ const Walk& walk() const {
    if constexpr (C::kOptions == 0) return kept_walk;
    return shared.work[slot].walk;  // registers are scarcer
  }
  // Whether every row attends every key of the step's tile, so that there is nothing to mask.
  __device__ bool whole(int step) const {
    return step >= walk().whole_steps().begin && step < walk().whole_steps().end;
  }
  __device__ int steps_end() const { return shared.work[slot].walk.steps().end; }

  // The product has added ALiBi's slope * (j - middle of the tile); what is missing is a constant of each row. That
  // holds while all keys lie on one side of the rows. Where they lie on both, the distance changes its sign inside the
  // tile, the product has added nothing, and all of ALiBi is added here.
  __device__ __forceinline__ void take_alibi(int tile, Units& units) {
    const Work& w = shared.work[slot];
    const ThreadRows rows = thread_rows(w);
    const float slope[2] = {row_terms().slope[rows.lane_row], row_terms().slope[rows.lane_row + 8]};
    if (side_of_keys<C>(p, w, first_position(w), tile) == Side::both) {
      add_alibi<C>(p, w, rows, tile, slope, units.scale, s);
      units.scale = 1.0f;
    } else {
      const int middle = tile * C::kTileK + C::kTileK / 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        units.shift[r] = -slope[r] * fabsf(static_cast<float>(rows.position(p, r) + w.off - middle));
      }
    }
  }

  __device__ __forceinline__ void take_plane(int step, Units& units) {
    if (p.bias.access != PlaneAccess::bulk && p.mask.access != PlaneAccess::bulk) return;
    const unsigned n = shared.work[slot].number_of(step), stage = n % C::kPlaneStages;
    await_filled(shared.bulk_ready[warpgroup][stage], n / C::kPlaneStages & 1);
    const bool released = planted_release(Plant::late_plane_reads, shared.bulk_free[warpgroup][stage]);
    const BulkTile<C>& bulk = shared.bulk[warpgroup][stage];
    if (p.bias.access == PlaneAccess::bulk) {
      add_bulk_bias<C>(bulk, warp_row(), p.scale, s);
      units.scale = 1.0f;
    } else {
      remove_by_bulk_mask<C>(bulk, warp_row(), s);
    }
    if (!released) release_after_reads(shared.bulk_free[warpgroup][stage]);
    if (p.mask.access == PlaneAccess::keys) remove_closed<C>(shared.closed_keys[n % kKeyTiles][lane % 4], s);
  }

  // Has a spoiled tile announced once more, as a careful one.
  __device__ void ask_again_if_spoiled(int done_slot, const RowState& rows) {
    if constexpr (C::kRemovesPairs) {
      TileWork<Walk>& done = shared.work[done_slot];
      if (is_spoiled<C>(p, o, rows)) atomicOr(&done.spoiled, 1);
      __syncwarp();  // all lanes have read it before one gives it back
    }
  }

  __device__ void release_v() {
    release_after_products(shared.v_free[v.index]);
    v.next();
  }

  __device__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) probabilities[i / 4][i % 4] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
  }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup, lane;
  int slot = 0;    // of the tile at hand
  Walk kept_walk;  // its walk, for kernels that have the registers
  RowState state;
  std::uint32_t q_phase = 0;
  bool keys_released = false;  // before their product: only ever where that is planted
  unsigned announced = 0;      // tiles, so far
  RingPosition<C::kStages> k, v;
  struct Nothing {};
  std::conditional_t<C::kByElement, ScoreOptions<C>, Nothing> options;
  float s[C::kTileK / 2];
  float o[C::kValueSize / 2];
  std::uint32_t probabilities[C::kTileK / 16][4];
  std::uint32_t q[C::kQInRegisters ? C::kHeadSize / 16 : 1][4];
};

}  // namespace heddle::cuda::sm90::attention_fwd

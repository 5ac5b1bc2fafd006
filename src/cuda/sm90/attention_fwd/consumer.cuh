// A warpgroup that owns 64 query rows of each tile: S = Q K^T, softmax, O += P V.
//
// Two products are in flight: while the softmax of key tile n runs, P(n-1) V(n-1) does. The pipeline does not drain
// between query tiles either: while one tile's O is written, the first S of the next is computed.
#pragma once

#include <type_traits>

#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_fwd/epilogue.cuh"
#include "cuda/sm90/attention_fwd/score_options.cuh"

namespace heddle::cuda::sm90::attention_fwd {

// O is rescaled only when a row's maximum has grown by more than this (log2): until then P may reach 2^8, which fp32
// sums and 16-bit floats hold as exactly as values below 1. (The conditional rescaling of FlashAttention-4.)
constexpr float kRescaleLog2 = 8;

// Turns s, in place, into exp2(s * scale_log2 - max) and brings the rows' maxima and sums up to date. Returns by
// `correction` what O must be multiplied with.
template <int kCount>
__device__ inline void softmax(float (&s)[kCount], RowState& state, float (&correction)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top0 = fmaxf(s[2 * r], s[2 * r + 1]), top1 = fmaxf(s[2 * r + 4], s[2 * r + 5]);
#pragma unroll
    for (int i = 8; i < kCount; i += 8) {
      top0 = fmaxf(top0, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      top1 = fmaxf(top1, fmaxf(s[i + 2 * r + 4], s[i + 2 * r + 5]));
    }
    float top = fmaxf(top0, top1);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)) * scale_log2;
    const float before = state.max[r];
    if (top > before + kRescaleLog2) state.max[r] = top;
    const float base = state.max[r] == -INFINITY ? 0.0f : state.max[r];
    correction[r] = ptx::exp2_approx(before - base);
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) {
      s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -base));
      s[i + 1] = ptx::exp2_approx(fmaf(s[i + 1], scale_log2, -base));
      sum0 += s[i];
      sum1 += s[i + 1];
    }
    state.sum[r] = state.sum[r] * correction[r] + (sum0 + sum1);
  }
}

// wgmma_wait<0>() in other words, so that the compiler does not merge the two.
__device__ inline void wgmma_wait_without_rescale() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // nothing to rescale" ::: "memory");
}

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    bool tile = next_work();
    if constexpr (!C::kRemovesPairs) {
      if (tile) compute_tiles();
    } else {
      for (;;) {
        if (tile) compute_tiles();
        if (shared.work[slot].position == kNoMoreTiles) return;
        __syncwarp();
        release(shared.work_free[slot]);  // of a pause
        tile = next_work();
      }
    }
  }

 private:
  using T = typename C::Element;
  using QTile = Tile<T, kRows, C::kHeadSize>;
  using KTile = Tile<T, C::kTileK, C::kHeadSize>;
  using VTile = Tile<T, C::kTileK, C::kValueSize>;
  using QK = Wgmma<T, C::kTileK>;
  using PV = Wgmma<T, C::kValueSize>;

  // The tile at hand and those after it, until next_work() has none.
  __device__ __forceinline__ void compute_tiles() {
    take_q();
    begin_score_options();
    ptx::barrier_wait(shared.k_ready[k.index], k.phase);
    issue_qk();
    load_score_options(shared.work[slot].k_end - 1);
    wgmma_wait<0>();
    float scale = take_s(shared.work[slot].k_end - 1);
    float correction[2];
    state = {};
    softmax(s, state, correction, scale);
    round_probabilities();
    for (;;) {
      bool accumulate = false;
      for (int tile = shared.work[slot].k_end - 2; tile >= k_begin; --tile) {
        ptx::barrier_wait(shared.k_ready[k.index], k.phase);
        issue_qk();
        issue_pv(accumulate);
        accumulate = true;
        load_score_options(tile);
        wgmma_wait<1>();
        scale = take_s(tile);
        softmax(s, state, correction, scale);
        keep(s);
        // Each branch has its own wait: one in front of the branch, the assembler would move in front of the softmax.
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
        finish_rows(p, done, thread_rows(done), sums, inverse);
        wgmma_wait<0>();
        keep(o);
        if constexpr (C::kRemovesPairs) release_v();
        store_rows<C>(p, staging(), done, first_position(done), warp_row(), o, inverse);
        if constexpr (C::kRemovesPairs) {
          ask_again_if_spoiled(done_slot);
          release(shared.work_free[done_slot]);
        }
        return;
      }
      take_q();
      begin_score_options();
      ptx::barrier_wait(shared.k_ready[k.index], k.phase);
      issue_qk();
      issue_pv(accumulate);
      load_score_options(shared.work[slot].k_end - 1);
      wgmma_wait<1>();
      scale = take_s(shared.work[slot].k_end - 1);
      state = {};
      softmax(s, state, correction, scale);
      keep(s);
      finish_rows(p, done, thread_rows(done), sums, inverse);
      wgmma_wait<0>();
      keep(o);
      release_v();
      store_rows<C>(p, staging(), done, first_position(done), warp_row(), o, inverse);
      ask_again_if_spoiled(done_slot);
      release(shared.work_free[done_slot]);
      round_probabilities();
    }
  }

  // One lane a warp tells the producer.
  __device__ void release(ptx::Barrier& free) {
    if (lane == 0) ptx::barrier_arrive(free);
  }

  __device__ int first_position(const Work& w) const { return w.position + warpgroup * p.positions; }
  __device__ ThreadRows thread_rows(const Work& w) const { return {first_position(w), warp_row() + lane / 4}; }
  // The first of this warp's 16 rows of the warpgroup's 64.
  __device__ int warp_row() const { return recomputed(static_cast<int>(threadIdx.x)) % 128 / 32 * 16; }
  __device__ auto& staging() { return shared.o[4 * warpgroup + warp_row() / 16]; }
  __device__ auto& planes() { return shared.planes[4 * warpgroup + warp_row() / 16]; }

  // Learns what the next tile is; false if there is none.
  __device__ bool next_work() {
    ptx::barrier_wait(shared.work_ready[next.index], next.phase);
    slot = next.index;
    next.next();
    const Work& work = shared.work[slot];
    k_begin = work.k_begin;
    whole_begin = work.whole_begin;
    whole_end = work.whole_end;
    return work.position >= 0;
  }

  __device__ void take_q() {
    ptx::barrier_wait(shared.q_ready[warpgroup], q_phase);
    q_phase ^= 1;
    if constexpr (C::kQInRegisters) {
      const int row = warp_row() + lane % 16;
#pragma unroll
      for (int step = 0; step < C::kHeadSize / 16; ++step) {
        // 16-byte chunk c of row r lies at chunk c ^ (r % 8).
        const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
        ptx::load_matrix_x4(q[step], &shared.q[warpgroup].panel[step / 4][row][8 * chunk]);
      }
      release(shared.q_free[warpgroup]);
    }
  }

  __device__ void issue_qk() {
    const Swizzled128 k_tile(shared.k[k.index].panel), q_tile(shared.q[warpgroup].panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 16; ++step) {
      const int panel = step / 4, bytes = step % 4 * 32;
      const std::uint64_t b = k_tile.at(panel * KTile::kPanelBytes + bytes);
      if constexpr (C::kQInRegisters) {
        QK::template registers_shared<false>(s, q[step], b, step > 0);
      } else {
        QK::shared_shared(s, q_tile.at(panel * QTile::kPanelBytes + bytes), b, step > 0);
      }
    }
    wgmma_commit();
  }

  __device__ void issue_pv(bool accumulate) {
    ptx::barrier_wait(shared.v_ready[v.index], v.phase);
    const Swizzled128 v_tile(shared.v[v.index].panel, VTile::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      PV::template registers_shared<true>(o, probabilities[step], v_tile.at(step * 2048), accumulate || step > 0);
    }
    wgmma_commit();
  }

  __device__ void begin_score_options() {
    if constexpr (C::kOptions != 0) {
      const Work& w = shared.work[slot];
      options.begin(p, planes(), w, first_position(w) + warp_row());
    }
  }

  __device__ void load_score_options(int tile) {
    if constexpr (C::kOptions != 0) {
      const Work& w = shared.work[slot];
      options.load(p, w, thread_rows(w), tile);
    }
  }

  // After a wait for S. The last one of a tile is done with q. Returns the factor that makes s logits in log2 units.
  __device__ __forceinline__ float take_s(int tile) {
    keep(s);
    release(shared.k_free[k.index]);
    k.next();
    if constexpr (!C::kQInRegisters) {
      if (tile == k_begin) release(shared.q_free[warpgroup]);
    }
    const Work& w = shared.work[slot];
    float scale = p.scale_log2;
    if constexpr (C::kOptions != 0) {
      auto* scratch = reinterpret_cast<float*>(&staging());
      const bool own = tile >= whole_begin && tile < whole_end && p.positions * p.pack == kRows &&
                       w.position + C::kConsumers * p.positions <= w.rows;
      scale = options.apply(p, w, thread_rows(w), first_position(w) + warp_row(), tile, own, planes(), scratch, s);
    }
    if (tile < whole_begin || tile >= whole_end) mask_band<C>(p, w, thread_rows(w), tile, s);
    return scale;
  }

  // P V has NaN where values are not finite. Where pairs may have been removed, nobody need have attended those: the
  // guard then finds out.
  __device__ void ask_again_if_spoiled(int done_slot) {
    if constexpr (C::kRemovesPairs) {
      Work& done = shared.work[done_slot];
      if (!done.careful) {
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < C::kValueSize / 2; ++i) sums[i % 4] += o[i];
        const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (sum != sum) atomicOr(&done.spoiled, 1);
      }
      __syncwarp();  // one lane then gives back what all have read
    }
  }

  __device__ void release_v() {
    release(shared.v_free[v.index]);
    v.next();
  }

  __device__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 4; ++i) probabilities[i / 4][i % 4] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
  }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup, lane;
  int slot = 0, k_begin = 0, whole_begin = 0, whole_end = 0;  // of the tile at hand
  RowState state;
  std::uint32_t q_phase = 0;
  RingPosition<kWorkSlots> next;
  RingPosition<C::kStages> k, v;
  struct Nothing {};
  std::conditional_t<C::kOptions != 0, ScoreOptions<C>, Nothing> options;
  float s[C::kTileK / 2];
  float o[C::kValueSize / 2];
  std::uint32_t probabilities[C::kTileK / 16][4];
  std::uint32_t q[C::kQInRegisters ? C::kHeadSize / 16 : 1][4];
};

}  // namespace heddle::cuda::sm90::attention_fwd

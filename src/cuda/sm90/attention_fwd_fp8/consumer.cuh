// A warpgroup that owns 64 query rows of each tile: S = Q K^T, softmax, O += P V.
//
// Two products are in flight: while the softmax of key tile n runs, P(n-1) V(n-1) does. The pipeline does not drain
// between query tiles either: while one tile's O is written, the first S of the next is computed.
//
// The tensor cores add e4m3 products with about 14 bits, so P V is summed there over a few key tiles only (`partial`)
// and then added to O in fp32. Ones beside V sum the rounded P in the same way: O is divided by that, so that the
// roundings of P that a whole row shares, and half of what truncation loses, cancel. lse comes from P before rounding.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_fwd/scores.cuh"
#include "cuda/sm90/attention_fwd_fp8/epilogue.cuh"
#include "cuda/sm90/attention_fwd_fp8/softmax.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

constexpr int kPartialTiles = 4;  // between promotions of P V to fp32

// wgmma_wait<0>() in other words, so that the compiler does not merge the two.
__device__ inline void wgmma_wait_without_promotion() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // nothing to promote" ::: "memory");
}

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number) {}

  __device__ void run() {
    if (!next_work()) return;
    take_q();
    ptx::barrier_wait(shared.k_ready[k.index], k.phase);
    issue_qk();
    wgmma_wait<0>();
    keep(s);
    float correction[2];
    take_first_s(correction);
    round_probabilities();
    for (;;) {
      clear_o();
      for (int tile = shared.work[slot].k_end - 2; tile >= k_begin; --tile) {
        ptx::barrier_wait(shared.k_ready[k.index], k.phase);
        issue_qk();
        issue_pv();
        wgmma_wait<1>();
        keep(s);
        const bool moved = take_s(tile, correction);
        keep(s);
        // Each branch has its own wait: one in front of the branch, the assembler would move in front of the softmax.
        if (moved || tile % kPartialTiles == 0) {
          wgmma_wait<0>();
          keep(partial);
          promote(correction);
        } else {
          wgmma_wait_without_promotion();
          keep(partial);
        }
        release_v();
        round_probabilities();
      }
      const int done_slot = slot;
      const Work& done = shared.work[done_slot];
      finish(done);
      if (!next_work()) {
        issue_pv();
        wgmma_wait<0>();
        keep(partial);
        write_o(done);
        return;
      }
      take_q();
      ptx::barrier_wait(shared.k_ready[k.index], k.phase);
      issue_qk();
      issue_pv();
      wgmma_wait<0>();
      keep(partial);
      release_v();
      write_o(done);
      release(shared.work_free[done_slot]);
      keep(s);
      take_first_s(correction);
      round_probabilities();
    }
  }

 private:
  using QK = Wgmma<__nv_fp8_e4m3, C::kTileK>;
  using PV = Wgmma<__nv_fp8_e4m3, C::kValueSize + 8>;
  static constexpr int kOutputs = C::kValueSize / 2;

  // One lane a warp tells the producer.
  __device__ void release(ptx::Barrier& free) {
    if (thread() % 32 == 0) ptx::barrier_arrive(free);
  }

  __device__ ThreadRows thread_rows(const Work& w) const {
    return {w.position + warpgroup * p.positions, warp_row() + thread() % 32 / 4};
  }
  // The first of this warp's 16 rows of the warpgroup's 64.
  __device__ int warp_row() const { return thread() % 128 / 32 * 16; }
  __device__ static int thread() { return attention_fwd::recomputed(static_cast<int>(threadIdx.x)); }

  // Learns what the next tile is; false if there is none.
  __device__ bool next_work() {
    ptx::barrier_wait(shared.work_ready[next.index], next.phase);
    slot = next.index;
    next.next();
    const Work& w = shared.work[slot];
    if (w.position < 0) return false;
    k_begin = w.k_begin;
    whole_begin = w.whole_begin;
    whole_end = w.whole_end;
    const float shared_scale = p.scale_log2 * head_scale(p.k_scale, w);
    const ThreadRows rows = thread_rows(w);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = rows.position(p, r);
      // q of other rows may be anything: 0 keeps them from moving a maximum, which others of the tile would notice.
      const bool exists = rows.lane_row + 8 * r < p.positions * p.pack && position < w.used_rows;
      scale[r] = exists ? shared_scale * p.q_scale.at(w.sequence, w.q_row + position, rows.head(p, w, r)) : 0.0f;
    }
    return true;
  }

  // Of k and v.
  __device__ float head_scale(const Scales& x, const Work& w) const { return x.at(w.sequence, 0, w.h / p.kv_divisor); }

  __device__ void take_q() {
    ptx::barrier_wait(shared.q_ready[warpgroup], q_phase);
    q_phase ^= 1;
  }

  __device__ void issue_qk() {
    const Swizzled128 k_tile(shared.k[k.index].panel), q_tile(shared.q[warpgroup].panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 32; ++step) {
      QK::shared_shared(s, q_tile.at(step * 32), k_tile.at(step * 32), step > 0);
    }
    wgmma_commit();
  }

  __device__ void issue_pv() {
    ptx::barrier_wait(shared.v_ready[v.index], v.phase);
    const Swizzled128 v_tile(shared.transposed[v.index].panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 32; ++step) {
      PV::registers_shared(partial, probabilities[step], v_tile.at(step * 32), true);
    }
    wgmma_commit();
  }

  // The tile of k is done with, and after the last one q is.
  __device__ void release_k(int tile) {
    release(shared.k_free[k.index]);
    k.next();
    if (tile == k_begin) release(shared.q_free[warpgroup]);
  }

  // From S of a tile to its P, unrounded. Returns whether O must be multiplied with `correction`.
  __device__ bool take_s(int tile, float (&correction)[2]) {
    if (started && tile >= whole_begin && tile < whole_end) {
      const float2 sums = exponentiate(s, state, scale, kShift);
      // The warpgroup multiplies as one, so it must also know as one. NaN stays NaN either way.
      if (ptx::barrier_all(1 + warpgroup, 128, !(sums.x == INFINITY || sums.y == INFINITY))) {
        release_k(tile);
        if (__all_sync(0xffffffff, !(sums.x > kLargestSum || sums.y > kLargestSum))) {
          state.sum[0] += sums.x;
          state.sum[1] += sums.y;
          correction[0] = correction[1] = 1.0f;
          return false;
        }
        lower(s, state, correction, sums, kShift);
        return true;
      }
      issue_qk();  // once more: S is lost
      wgmma_wait<0>();
      keep(s);
    }
    take_s_exactly(tile, correction);
    return __any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f);
  }

  __device__ void take_s_exactly(int tile, float (&correction)[2]) {
    release_k(tile);
#pragma unroll
    for (int i = 0; i < C::kTileK / 2; ++i) s[i] = scale[i / 2 % 2] == 0.0f ? 0.0f : s[i] * scale[i / 2 % 2];
    const Work& w = shared.work[slot];
    if (tile < whole_begin || tile >= whole_end) attention_fwd::mask_band<C>(p, w, thread_rows(w), tile, s);
    exact_softmax(s, state, correction, kShift);
    started = ptx::barrier_all(1 + warpgroup, 128, state.max[0] > -INFINITY && state.max[1] > -INFINITY);
  }

  __device__ void release_v() {
    release(shared.v_free[v.index]);
    v.next();
  }

  __device__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 32; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* x = s + 16 * i + r / 2 * 8 + r % 2 * 2;
        probabilities[i][r] = ptx::pack4_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
  }

  __device__ void take_first_s(float (&correction)[2]) {
    state = {};
    take_s_exactly(shared.work[slot].k_end - 1, correction);
  }

  __device__ void clear_o() {
#pragma unroll
    for (float& x : o) x = 0.0f;
#pragma unroll
    for (float& x : partial) x = 0.0f;
  }

  // partial is cleared here, not by wgmma's predicate: all warps of a warpgroup must agree on that.
  __device__ void promote(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs + 4; ++i) {
      o[i] = (o[i] + partial[i]) * correction[i / 2 % 2];
      partial[i] = 0.0f;
    }
  }

  // Writes lse; leaves what O over the sum of P must be multiplied with.
  __device__ void finish(const Work& w) {
    float factor[2];
    state.max[0] -= kShift;
    state.max[1] -= kShift;
    finish_rows(p, w, thread_rows(w), state, factor);
    const float v_scale = head_scale(p.v_scale, w);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state.sum[r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      factor[r] *= sum * v_scale;  // v_scale, but for a sink
    }
    parked_factor() = {factor[0], factor[1]};
  }

  __device__ void write_o(const Work& w) {
    constexpr float kOne[2] = {1.0f, 1.0f};
    promote(kOne);
    const float2 parked = parked_factor();
    const float upper = o[kOutputs], lower = o[kOutputs + 2];
    const float factor[2] = {upper == 0.0f ? 0.0f : __fdividef(parked.x, upper),
                             lower == 0.0f ? 0.0f : __fdividef(parked.y, lower)};
    store_rows<C>(p, w, thread_rows(w), o, factor);
  }

  __device__ float2& parked_factor() { return shared.factor[thread() - 128]; }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup;
  int slot = 0, k_begin = 0, whole_begin = 0, whole_end = 0;  // of the tile at hand
  bool started = false;                                       // every row of the warpgroup has met a key
  RowState state;
  float scale[2];
  std::uint32_t q_phase = 0;
  RingPosition<kWorkSlots> next;
  RingPosition<C::kStages> k, v;
  float s[C::kTileK / 2];
  float o[kOutputs + 4], partial[kOutputs + 4];  // the last four: sums of P as rounded
  std::uint32_t probabilities[C::kTileK / 32][4];
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

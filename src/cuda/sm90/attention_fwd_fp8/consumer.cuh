// A warpgroup that owns 64 query rows of each tile: S = Q K^T, softmax, O += P V.
//
// Two products are in flight: while the softmax of key tile n runs, P(n-1) V(n-1) does. The pipeline does not drain
// between query tiles either: while one tile's O is written, the first S of the next is computed.
//
// The tensor cores add e4m3 products with about 14 bits, so P V is summed there over one key tile only (`partial`) and
// then added to O in fp32. Ones beside V sum the rounded P in the same way: O is divided by that, so that the roundings
// of P that a whole row shares cancel. lse comes from P before rounding. With scales by token, P is rounded together
// with v's, and O is divided by the sum of P before rounding.
//
// A warp waits for the others of its warpgroup at the products only: asking them about overflow in every tile of keys
// took a tenth of the time. Where exponentials overflow, the whole query tile is computed again.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention/rows.cuh"
#include "cuda/sm90/attention_fwd_fp8/epilogue.cuh"
#include "cuda/sm90/attention_fwd_fp8/softmax.cuh"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number) {}

  __device__ void run() {
    parked() = {};
    for (;;) {
      if (next_work()) compute_tiles();
      if (__all_sync(0xffffffff, shared.work[slot()].position == kNoMoreTiles)) return;
      __syncwarp();
      ptx::barrier_arrive(shared.work_free[slot()]);  // of a pause
    }
  }

 private:
  using Walk = typename C::Walk;
  using QK = Wgmma<__nv_fp8_e4m3, C::kTileK>;
  static constexpr int kOnes = C::kTokenScales ? 0 : 8;  // columns of P V that are sums of P
  using PV = Wgmma<__nv_fp8_e4m3, C::kValueSize + kOnes>;
  static constexpr int kScores = C::kTileK / 2, kOutputs = C::kValueSize / 2;

  // The tile at hand and those after it, until next_work() has none.
  __device__ __forceinline__ void compute_tiles() {
    take_q();
    ptx::barrier_wait(shared.k_ready[k.index], k.phase);
    issue_qk();
    wgmma_wait<0>();
    keep(s);
    take_first_s();
    for (;;) {
      clear_o();
      int step = shared.work[slot()].walk.steps().end - 1;
      for (Outlook next_tile = look_ahead(step); vote(next_tile.exists);) {
        --step;
        const bool guess = vote(next_tile.whole) && started();
        if (!next_tile.k_there) ptx::barrier_wait(shared.k_ready[k.index], k.phase);
        issue_qk();
        issue_pv();
        wgmma_wait<1>();
        keep(s);
        release_k(vote(next_tile.last));
        if (guess) {
          next_tile = take_s(step);
        } else {
          wgmma_wait<0>();
          add_pv();
          take_s_exactly(step);
          next_tile = look_ahead(step);
        }
      }
      finish(shared.work[slot()]);
      if (!next_work()) {
        issue_pv();
        wgmma_wait<0>();
        add_pv();
        write_o();
        return;
      }
      take_q();
      ptx::barrier_wait(shared.k_ready[k.index], k.phase);
      issue_qk();
      issue_pv();
      wgmma_wait<0>();
      add_pv();
      write_o();
      keep(s);
      take_first_s();
    }
  }

  // What the loop asks about the next tile of keys. Looked up ahead of time, while exponentials are computed, so that
  // no step begins with waiting for shared memory.
  struct Outlook {
    bool exists, last, whole;  // whole: all rows attend it wholly
    bool k_there;              // its keys have landed; else they must be waited for
  };
  __device__ Outlook look_ahead(int step) {
    const Walk& walk = shared.work[slot()].walk;
    const Interval<int>& whole = walk.whole_steps();
    return {step > walk.steps().begin, step - 1 == walk.steps().begin, step > whole.begin && step <= whole.end,
            ptx::barrier_test(shared.k_ready[k.index], k.phase)};
  }

  // x, which is the same in all lanes. The vote tells the compiler so, which then keeps what follows from it in the
  // warp's uniform registers.
  __device__ static bool vote(bool x) { return __all_sync(0xffffffff, x); }

  // Whether every row of the warp has met a key: maxima may be guessed.
  __device__ bool started() const { return vote(state.max[0] > -INFINITY && state.max[1] > -INFINITY); }

  __device__ ThreadRows thread_rows(const Work& w) const {
    return {w.position + warpgroup * p.positions, warp_row() + thread() % 32 / 4};
  }
  // The first of this warp's 16 rows of the warpgroup's 64.
  __device__ int warp_row() const { return thread() % 128 / 32 * 16; }
  __device__ static int thread() { return recomputed(static_cast<int>(threadIdx.x)); }

  // The slot of the tile that next_work() has taken last, or of one `before` it.
  __device__ unsigned slot(unsigned before = 0) { return (parked().works - 1 - before) % kWorkSlots; }

  // Waits until the next tile is announced, and finds the scales of its rows. False if it is a pause or there are no
  // more.
  __device__ bool next_work() {
    const unsigned works = parked().works++;
    ptx::barrier_wait(shared.work_ready[works % kWorkSlots], works / kWorkSlots % 2);
    const Work& w = shared.work[slot()];
    if (__all_sync(0xffffffff, w.position < 0)) return false;
    const float shared_scale = p.scale_log2 * (C::kTokenScales ? 1.0f : head_scale(p.k_scale, w));
    const ThreadRows rows = thread_rows(w);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = rows.position(p, r);
      // Rows that do not exist may hold any q. A scale of 0 makes their scores 0, so that they move no maximum and
      // overflow nothing: a warp, and for overflow a whole tile, asks about all of its rows together.
      const bool exists = rows.lane_row + 8 * r < p.positions * p.pack && position < w.used_rows;
      scale[r] = exists ? shared_scale * p.q_scale.at(w.sequence, w.q_row + position, rows.head(p, w, r)) : 0.0f;
    }
    return true;
  }

  // The scale of the tile's head of k or v.
  __device__ float head_scale(const Scales& x, const Work& w) const { return x.at(w.sequence, 0, w.h / p.kv_divisor); }

  __device__ void take_q() {
    await_filled(shared.q_ready[warpgroup], parked().q_phase);
    parked().q_phase ^= 1;
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

  // Does not wait for V^T: take_s() and take_s_exactly(), which made P, have.
  __device__ void issue_pv() {
    const Swizzled128 v_tile(shared.transposed[v.index].panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 32; ++step) {
      PV::registers_shared(partial, probabilities[step], v_tile.at(step * 32), step > 0);
    }
    wgmma_commit();
    v.next();
  }

  // The tile of k is done with, and after the last one q is.
  __device__ void release_k(bool last) {
    release_after_products(shared.k_free[k.index]);
    k.next();
    if (last) release_after_products(shared.q_free[warpgroup]);
  }

  // From S of a whole tile to its P; adds P V of the tile before to O.
  __device__ Outlook take_s(int step) {
    // So many exponentials take longer than P V, which runs beside them; the others run beside sums and roundings.
    constexpr int kEarly = C::kTokenScales ? 0 : 40;
    float sum[2] = {};
    if constexpr (C::kTokenScales) {
      wgmma_wait<0>();
      add_pv();
      scale_scores();
    } else {
      const bool v_there = ptx::barrier_test(shared.v_ready[v.index], v.phase);
      exponentiate<0, kEarly>(s, state, scale, kShift, sum);
      if (!v_there || !known(sum[0] + sum[1])) ptx::barrier_wait(shared.v_ready[v.index], v.phase);
      wgmma_wait<0>();
      add_pv();
    }
    const Outlook next_tile = look_ahead(step);
    exponentiate<kEarly, kScores>(s, state, scale, kShift, sum);
    round_probabilities();
    if (__all_sync(0xffffffff, !(sum[0] > kLargestSum || sum[1] > kLargestSum))) {
      state.sum[0] += sum[0];
      state.sum[1] += sum[1];
    } else {
      float correction[2];
      lower(s, state, correction, sum, kShift);
      correct_o(correction);
      round_probabilities();
    }
    return next_tile;
  }

  __device__ void take_s_exactly(int step) {
    if constexpr (C::kTokenScales) scale_scores();
    const TileWork<Walk>& w = shared.work[slot()];
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = scale[i / 2 % 2] == 0.0f ? 0.0f : s[i] * scale[i / 2 % 2];
    const Interval<int>& whole = w.walk.whole_steps();
    if (step < whole.begin || step >= whole.end) {
      attention::mask_band<C>(p, w, thread_rows(w), w.walk.index(step), s);
    }
    float correction[2];
    exact_softmax(s, state, correction, kShift);
    correct_o(correction);
    round_probabilities();
    if constexpr (!C::kTokenScales) ptx::barrier_wait(shared.v_ready[v.index], v.phase);
  }

  // Multiplies S with k's scales, which come with V^T.
  __device__ void scale_scores() {
    ptx::barrier_wait(shared.v_ready[v.index], v.phase);
    const float* const scales = shared.scales[v.index].k + 2 * (thread() % 4);
#pragma unroll
    for (int j = 0; j < C::kTileK / 8; ++j) {
      const float2 of = *reinterpret_cast<const float2*>(scales + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] *= i % 2 == 0 ? of.x : of.y;
    }
  }

  __device__ void take_first_s() {
    const int step = shared.work[slot()].walk.steps().end - 1;
    state = {};
    release_k(vote(step == shared.work[slot()].walk.steps().begin));
    take_s_exactly(step);
  }

  __device__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < C::kTileK / 32; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int first = 16 * i + r / 2 * 8;  // of 16 keys
        const float* x = s + first + r % 2 * 2;
        if constexpr (C::kTokenScales) {
          const float* const scales = shared.scales[v.index].v + 2 * (thread() % 4) + 2 * first;
          const float2 left = *reinterpret_cast<const float2*>(scales);
          const float2 right = *reinterpret_cast<const float2*>(scales + 8);
          probabilities[i][r] = ptx::pack4_e4m3(x[0] * left.x, x[1] * left.y, x[4] * right.x, x[5] * right.y);
        } else {
          probabilities[i][r] = ptx::pack4_e4m3(x[0], x[1], x[4], x[5]);
        }
      }
    }
  }

  __device__ void clear_o() {
#pragma unroll
    for (float& x : o) x = 0.0f;
    rounded[0] = rounded[1] = 0.0f;
  }

  // When P V is there.
  __device__ void add_pv() {
    keep(partial);
    const int stage = (v.index == 0 ? C::kStages : v.index) - 1;
    if constexpr (C::kTokenScales) {
      const float largest = shared.scales[stage].largest_v;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] = fmaf(partial[i], largest, o[i]);
      // Every thread for itself: its scales, too, are to be stored anew.
      ptx::barrier_arrive(shared.v_free[stage]);
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] += partial[i];
      rounded[0] += partial[kOutputs];
      rounded[1] += partial[kOutputs + 2];
      release_after_products(shared.v_free[stage]);
    }
  }

  __device__ void correct_o(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= correction[i / 2 % 2];
    if constexpr (!C::kTokenScales) {
      rounded[0] *= correction[0];
      rounded[1] *= correction[1];
    }
  }

  // Writes lse; leaves what O over the sum of P must be multiplied with. Where exponentials overflowed, asks for the
  // tile again.
  __device__ void finish(TileWork<Walk>& w) {
    float factor[2];
    state.max[0] -= kShift;
    state.max[1] -= kShift;
    finish_rows(p, w, thread_rows(w), state, factor);
    const float v_scale = C::kTokenScales ? 1.0f : head_scale(p.v_scale, w);
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_quad(state.sum[r]);
      finite = finite && (sum < INFINITY || scale[r] == 0.0f);     // 0: there is no such row
      if constexpr (!C::kTokenScales) factor[r] *= sum * v_scale;  // v_scale, but for a sink
    }
    if (!finite && !w.careful) atomicOr(&w.spoiled, 1);
    parked().factor[0] = factor[0];
    parked().factor[1] = factor[1];
  }

  // Writes O of the tile before the one that next_work() has taken last.
  __device__ void write_o() {
    const unsigned done = slot(1);
    const Work& w = shared.work[done];
    float factor[2] = {parked().factor[0], parked().factor[1]};
    if constexpr (!C::kTokenScales) {
      factor[0] = rounded[0] == 0.0f ? 0.0f : __fdividef(factor[0], rounded[0]);
      factor[1] = rounded[1] == 0.0f ? 0.0f : __fdividef(factor[1], rounded[1]);
    }
    store_rows<C>(p, w, thread_rows(w), o, factor);
    ptx::barrier_arrive(shared.work_free[done]);
  }

  __device__ Parked& parked() { return shared.parked[thread() - 128]; }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup;
  RowState state;
  float scale[2];
  RingPosition<C::kStages> k, v;
  float s[kScores];
  float o[kOutputs], rounded[2];        // rounded: sums of P as rounded
  float partial[kOutputs + kOnes / 2];  // P V of one key tile; the last four are sums of P
  std::uint32_t probabilities[C::kTileK / 32][4];
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8

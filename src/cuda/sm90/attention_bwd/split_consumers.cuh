// The two warpgroups for head sizes above 128. The first computes P and dV, the second dS and dK, both for all 64 keys,
// and each every other panel of dQ. P goes from one to the other through shared memory, rounded, register by register:
// the same thread of both holds the same pairs.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_bwd/warpgroup.cuh"

namespace heddle::cuda::sm90::attention_bwd {

// S, P, dV, and even panels of the dQ of the tile before: their dS has been there for a while.
template <class C>
class ProbabilityConsumer : Warpgroup<C> {
 public:
  __device__ ProbabilityConsumer(const Params& params, SharedMemory<C>& memory) : Base(params, memory, 0) {}

  __device__ void run() {
    Base::clear(dv);
    this->prepare_keys();
    QueryTiles tiles(shared.work);
    if (tiles.left > 0) {
      ptx::barrier_wait(shared.q_ready[0], 0);
      issue_scores(0);
      float* last = nullptr;  // dQ of the tile before
#pragma unroll 1
      for (; tiles.left > 0; tiles.next()) {
        step(tiles.head, tiles.tile() * C::kTileQ, tiles.left > 1, last);
        last = this->sum_of(tiles.head, tiles.tile(), 0);
      }
      const int buffer = ds.index ^ 1;
      ptx::barrier_wait(shared.ds_ready[buffer], ds.phase ^ (ds.index == 0));
#pragma unroll 1
      for (int panel = 0; panel < C::kHeadSize / kPanel; panel += 2) {
        typename Base::Block dq;
        this->issue_query_gradient(buffer, 0, panel, dq);
        wgmma_wait<0>();
        keep(dq);
        this->add(dq, last + panel * (64 * 64), buffer);
      }
      this->await_staging();
    }
    this->store(p.problem.dv, p.dv, p.problem.Dv, dv, 1.0f);
  }

 private:
  using Base = Warpgroup<C>;
  using Base::p, Base::shared;

  __device__ void issue_scores(int n) { this->template issue_products<C::kTileQ>(shared.k, shared.q[n], 0, s); }

  __device__ __forceinline__ void step(int head, int row, bool more, float* last) {
    const int n = q.index;
    wgmma_wait<0>();
    keep(s);
    typename Base::Pairs pairs;
    this->probabilities(n, head, row, 0, s, pairs);
    release_after_reads(shared.q_free[n]);  // of lse
    ptx::barrier_wait(shared.p_free, phase ^ 1);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      typename Base::Pairs with_factors;  // of dS
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        with_factors[m][n] = C::kOption == Option::kSoftcap
                                 ? ptx::pack2<typename Base::T>(s[8 * m + 2 * n], s[8 * m + 2 * n + 1])
                                 : pairs[m][n];
      }
      shared.probabilities[m][Base::thread()] =
          make_uint4(with_factors[m][0], with_factors[m][1], with_factors[m][2], with_factors[m][3]);
    }
    ptx::barrier_arrive(shared.p_ready);
    ptx::barrier_wait(shared.d_o_ready[0], phase);
    this->issue_gradient(pairs, shared.d_o[0], 0, dv);

    // dQ of the tile before. At the first tile there is none: then over this tile's dS, and thrown away.
    const bool first = last == nullptr;
    const int buffer = first ? 0 : ds.index ^ 1;
    ptx::barrier_wait(shared.ds_ready[buffer], first ? 0 : ds.phase ^ (ds.index == 0));
    typename Base::Block dq;
    this->issue_query_gradient(buffer, 0, 0, dq);
    wgmma_wait<0>();
    keep(dv);
    keep(dq);
    release_after_products(shared.d_o_free[0]);
    if (!first) this->add(dq, last, buffer);
    this->issue_query_gradient(buffer, 0, 2, dq);
    const RingPosition<C::kStages> current = q;
    q.next();
    const int following = more ? q.index : n;  // after the last tile: one that is there, and its scores are thrown away
    ptx::barrier_wait(shared.q_ready[following], more ? q.phase : current.phase);
    issue_scores(following);
    wgmma_wait<1>();
    keep(dq);
    if (!first) {
      release_after_products(shared.ds_free[buffer]);
      this->add(dq, last + 2 * (64 * 64), buffer);
    }
    ds.next();
    phase ^= 1;
    wgmma_wait<0>();
    keep(s);
  }

  RingPosition<C::kStages> q;
  RingPosition<2> ds;
  std::uint32_t phase = 0;  // of dO and P, of which there is one stage
  typename Base::Scores s;
  typename Base::Accumulators dv;
};

// dP, dS, dK, and odd panels of dQ.
template <class C>
class GradientConsumer : Warpgroup<C> {
 public:
  __device__ GradientConsumer(const Params& params, SharedMemory<C>& memory) : Base(params, memory, 1) {}

  __device__ void run() {
    Base::clear(dk);
    this->prepare_keys();
    QueryTiles tiles(shared.work);
#pragma unroll 1
    for (; tiles.left > 0; tiles.next()) step(this->sum_of(tiles.head, tiles.tile(), 0));
    this->await_staging();
    this->store(p.problem.dk, p.dk, p.problem.D, dk, p.problem.scale);
  }

 private:
  using Base = Warpgroup<C>;
  using Base::p, Base::shared;

  __device__ __forceinline__ void step(float* sum) {
    typename Base::Part dp;
    ptx::barrier_wait(shared.d_o_ready[0], phase);
    this->template issue_products<C::kTileQ>(shared.v, shared.d_o[0], 0, dp);
    ptx::barrier_wait(shared.p_ready, phase);
    typename Base::Pairs pairs;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint4 words = shared.probabilities[m][Base::thread()];
      pairs[m][0] = words.x, pairs[m][1] = words.y, pairs[m][2] = words.z, pairs[m][3] = words.w;
    }
    ptx::barrier_arrive(shared.p_free);
    ptx::barrier_wait(shared.ds_free[ds.index], ds.phase ^ 1);
    wgmma_wait<0>();
    keep(dp);
    this->score_gradients(
        shared.delta[0], 0, ds.index, dp,
        [&](int i) { return ptx::unpack2<typename Base::T>(pairs[i / 8][i / 4 % 2 * 2 + i / 2 % 2]); }, gradients);
    Base::publish(shared.ds_ready[ds.index]);
    release_after_products(shared.d_o_free[0]);  // delta went into dS, whose stores a fence follows
    ptx::barrier_wait(shared.q_ready[q.index], q.phase);
    this->issue_gradient(gradients, shared.q[q.index], 0, dk);
    ptx::barrier_wait(shared.ds_ready[ds.index], ds.phase);
#pragma unroll
    for (int panel = 1; panel < C::kHeadSize / kPanel; panel += 2) {
      typename Base::Block dq;
      this->issue_query_gradient(ds.index, 0, panel, dq);
      wgmma_wait<0>();
      keep(dq);
      if (panel == 1) {
        keep(dk);
        release_after_products(shared.q_free[q.index]);
      }
      this->add(dq, sum + panel * (64 * 64), ds.index);
    }
    release_after_products(shared.ds_free[ds.index]);
    ds.next();
    q.next();
    phase ^= 1;
  }

  RingPosition<C::kStages> q;
  RingPosition<2> ds;
  std::uint32_t phase = 0;  // of dO and P
  typename Base::Pairs gradients;
  typename Base::Accumulators dk;
};

}  // namespace heddle::cuda::sm90::attention_bwd

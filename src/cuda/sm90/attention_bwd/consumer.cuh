// A warpgroup for head sizes up to 128: all products of 64 keys with one query tile after the other, and half of the
// tile's dQ, which sums over the keys of both warpgroups.
#pragma once

#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_bwd/warpgroup.cuh"

namespace heddle::cuda::sm90::attention_bwd {

template <class C>
class Consumer : Warpgroup<C> {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number) : Base(params, memory, number) {}

  __device__ void run() {
    Base::clear(dk);
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
        last = this->sum_of(tiles.head, tiles.tile(), warpgroup);
      }
      typename Base::Block dq;
      issue_last_query_gradient(dq, false);
      wgmma_wait<0>();
      keep(dq);
      this->add(dq, last, ds.index ^ 1);
      this->await_staging();
    }
    this->store(p.problem.dv, p.dv, p.problem.Dv, dv, 1.0f);
    this->store(p.problem.dk, p.dk, p.problem.D, dk, p.problem.scale);
  }

 private:
  using Base = Warpgroup<C>;
  using Base::kParts, Base::kPartQ, Base::p, Base::shared, Base::warpgroup;

  __device__ void issue_scores(int n) { this->template issue_products<C::kTileQ>(shared.k, shared.q[n], 0, s); }

  // Starts dQ of the query tile before, and returns the buffer of its dS. At the first tile there is none before: then
  // the product runs over this tile's dS and is thrown away.
  __device__ int issue_last_query_gradient(typename Base::Block& dq, bool first) {
    const int buffer = first ? 0 : ds.index ^ 1;
    if (!planted(Plant::unawaited_gradients)) {
      ptx::barrier_wait(shared.ds_ready[buffer], first ? 0 : ds.phase ^ (ds.index == 0));
    }
    constexpr bool kByRows = C::kTileQ == 128;  // else by dims
    this->issue_query_gradient(buffer, kByRows ? 64 * warpgroup : 0, kByRows ? 0 : warpgroup, dq);
    return buffer;
  }

  // One query tile, whose scores are under way. Leaves those of the next under way, if `more`; and adds to the tile
  // before what dQ it gets from these keys. So a warpgroup waits for no dS that the other one has just computed: they
  // may be half a tile apart, and one's exponentials run under the other's products.
  __device__ __forceinline__ void step(int head, int row, bool more, float* last) {
    const int n = stage.index;
    await_filled(shared.d_o_ready[n], stage.phase);
    const bool released = planted_release(Plant::late_query_reads, shared.q_free[n]);
    typename Base::Pairs gradients;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      typename Base::Part dp;
      this->template issue_products<kPartQ>(shared.v, shared.d_o[n], part * kPartQ, dp);
      if (part == 0) {
        wgmma_wait<1>();
        keep(s);
      }
      auto& x = reinterpret_cast<typename Base::Part&>(s[part * kPartQ / 2]);
      typename Base::Pairs pairs;
      this->probabilities(n, head, row, part, x, pairs);
      this->issue_gradient(pairs, shared.d_o[n], part, dv);
      if (part == 0) ptx::barrier_wait(shared.ds_free[ds.index], ds.phase ^ 1);
      wgmma_wait<1>();
      keep(dp);
      this->score_gradients(
          shared.delta[n], part, ds.index, dp, [&](int i) { return make_float2(x[i], x[i + 1]); }, gradients);
      if (part == kParts - 1) Base::publish(shared.ds_ready[ds.index]);
      this->issue_gradient(gradients, shared.q[n], part, dk);
    }

    const bool first = last == nullptr;
    typename Base::Block dq;
    const int buffer = issue_last_query_gradient(dq, first);
    wgmma_wait<1>();
    keep(dk);
    keep(dv);
    // lse and delta went into P and dS, whose products are done.
    if (!released) release_after_products(shared.q_free[n]);
    release_after_products(shared.d_o_free[n]);
    // After the last tile there is no next: scores of one that is there are computed once more, and thrown away.
    const RingPosition<C::kStages> current = stage;
    stage.next();
    const int following = more ? stage.index : n;
    ptx::barrier_wait(shared.q_ready[following], more ? stage.phase : current.phase);
    issue_scores(following);
    wgmma_wait<1>();
    keep(dq);
    if (!first) {
      release_after_products(shared.ds_free[buffer]);
      this->add(dq, last, buffer);
    }
    ds.next();
    wgmma_wait<0>();  // ptxas would serialise products that are under way from one round of the loop to the next
    keep(s);
  }

  RingPosition<C::kStages> stage;  // of q and of dO
  RingPosition<2> ds;
  typename Base::Scores s;
  typename Base::Accumulators dk, dv;
};

}  // namespace heddle::cuda::sm90::attention_bwd

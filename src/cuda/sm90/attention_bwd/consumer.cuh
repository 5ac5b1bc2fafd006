// A warpgroup: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q for 64 keys and one query tile after the other, and
// half of the tile's dQ = dS K. Keys are on M, so P^T and dS^T are operands in registers as they come; only dS goes
// through shared memory, for dQ sums over the keys of both warpgroups.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_bwd/epilogue.cuh"
#include "cuda/sm90/attention_bwd/producer.cuh"
#include "cuda/sm90/attention_bwd/scores.cuh"

namespace heddle::cuda::sm90::attention_bwd {

__device__ inline void consumers_meet() { ptx::barrier_sync<1, 128 * kConsumers>(); }

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number) {}

  __device__ void run() {
    const Work& w = shared.work;
    const int count = w.tiles * static_cast<int>(p.problem.G);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) dk[i] = dv[i] = 0.0f;
    prepare_keys();
    if (count > 0) {
      int tile = w.first_tile, head = w.kv_head * static_cast<int>(p.problem.G);
      ptx::barrier_wait(shared.q_ready[0], 0);
      issue_scores(0);
#pragma unroll 1
      for (int n = count; n > 0; --n) {
        step(head, tile * C::kTileQ, n > 1);
        if (++tile == w.first_tile + w.tiles) tile = w.first_tile, ++head;
      }
    }
    store();
  }

 private:
  using T = typename C::Element;
  static constexpr int kScores = C::kTileQ / 2, kAccumulators = C::kHeadSize / 2, kSteps = C::kHeadSize / 16;
  static constexpr int kQuerySteps = C::kTileQ / 16;
  static constexpr bool kKeepsScores = C::kTileQ <= 64;  // P in f32 until dS; else as it was rounded
  using ScoreProduct = Wgmma<T, C::kTileQ>;
  using GradientProduct = Wgmma<T, C::kHeadSize>;
  using QueryProduct = Wgmma<T, 64>;
  static constexpr std::uint32_t kRowBytes = kPanel * sizeof(T);  // of a panel

  __device__ static int thread() { return attention_fwd::recomputed(static_cast<int>(threadIdx.x)) % 128; }

  // Keys and values that are not in use become zeros: dS is zero for them, but zero times NaN is not.
  __device__ void prepare_keys() {
    const Work& w = shared.work;
    ptx::barrier_wait(shared.k_ready, 0);
    ptx::barrier_wait(shared.v_ready, 0);
    if (w.keys == kTileK) return;
    clear_rows_from(shared.k, w.keys, kTileK, static_cast<int>(threadIdx.x) - 128, 128 * kConsumers);
    clear_rows_from(shared.v, w.keys, kTileK, static_cast<int>(threadIdx.x) - 128, 128 * kConsumers);
    ptx::fence_async_shared();
    consumers_meet();
  }

  __device__ void issue_scores(int n) {
    issue_products(shared.k, shared.q[n], s);
  }

  // This warpgroup's keys (or values) times a tile of q (or dO), transposed.
  template <class Keys, class Queries>
  __device__ void issue_products(const Keys& keys, const Queries& queries, float (&to)[kScores]) {
    const Swizzled128 a(keys.panel[0][warpgroup * kKeys]), b(queries.panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ScoreProduct::shared_shared(to, a.at(step / 4 * Keys::kPanelBytes + step % 4 * 32),
                                  b.at(step / 4 * Queries::kPanelBytes + step % 4 * 32), step > 0);
    }
    wgmma_commit();
  }

  // Accumulates `pairs`, P^T or dS^T, times a tile of dO or q.
  template <class Queries>
  __device__ void issue_gradient(const std::uint32_t (&pairs)[kQuerySteps][4], const Queries& queries,
                                 float (&to)[kAccumulators]) {
    const Swizzled128 b(queries.panel, Queries::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      GradientProduct::template registers_shared<true>(to, pairs[step], b.at(step * 16 * kRowBytes), true);
    }
    wgmma_commit();
  }

  // The block of dQ that this warpgroup computes: its rows, or its dims.
  __device__ void issue_query_gradient(int buffer, float (&dq)[32]) {
    constexpr bool kByRows = C::kTileQ == 128;
    using Scores = Tile<T, C::kTileQ, kTileK>;
    using Keys = Tile<T, kTileK, C::kHeadSize>;
    const Swizzled128 a(shared.ds[buffer].panel[0][kByRows ? 64 * warpgroup : 0]);
    const Swizzled128 b(shared.k.panel[kByRows ? 0 : warpgroup], Keys::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      QueryProduct::template shared_shared<true>(dq, a.at(step / 4 * Scores::kPanelBytes + step % 4 * 32),
                                                 b.at(step * 16 * kRowBytes), step > 0);
    }
    wgmma_commit();
  }

  // One query tile, whose scores are under way. Leaves those of the next under way, if `more`.
  __device__ __forceinline__ void step(int head, int row, bool more) {
    const Work& w = shared.work;
    const int n = stage.index;
    float dp[kScores];
    ptx::barrier_wait(shared.d_o_ready[n], stage.phase);
    issue_products(shared.v, shared.d_o[n], dp);

    wgmma_wait<1>();
    keep(s);
    const int key = w.first_key + warpgroup * kKeys;
    if (!attends_all<C>(p, w, row, key)) mask_band(p, w, row, key, s);
    std::uint32_t pairs[kQuerySteps][4];
    const float* lse = shared.lse[n] + first_query();
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 base = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* x = s + 4 * j + 2 * r;
        x[0] = ptx::exp2_approx(fmaf(x[0], p.scale_log2, -base.x));
        x[1] = ptx::exp2_approx(fmaf(x[1], p.scale_log2, -base.y));
        pairs[j / 2][j % 2 * 2 + r] = ptx::pack2<T>(x[0], x[1]);
      }
    }
    issue_gradient(pairs, shared.d_o[n], dv);

    wgmma_wait<1>();
    keep(dp);
    std::uint32_t ds[kQuerySteps][4];
    const float* delta = shared.delta[n] + first_query();
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 base = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float2 probability =
            kKeepsScores ? make_float2(s[i], s[i + 1]) : ptx::unpack2<T>(pairs[j / 2][j % 2 * 2 + r]);
        ds[j / 2][j % 2 * 2 + r] =
            ptx::pack2<T>(probability.x * (dp[i] - base.x), probability.y * (dp[i + 1] - base.y));
      }
      if (j % 2 == 1) ptx::store_matrix_x4_transposed(ds_address() + j / 2 * (16 * kRowBytes), ds[j / 2]);
    }
    ptx::fence_async_shared();
    issue_gradient(ds, shared.q[n], dk);

    // After the last tile, one that is there already is computed once more, for nothing.
    RingPosition<kStages> next = stage;
    next.next();
    const int following = more ? next.index : n;
    ptx::barrier_wait(shared.q_ready[following], more ? next.phase : stage.phase);
    issue_scores(following);

    consumers_meet();
    // dS is free then: there are no registers for it beside S, dQ, dK and dV.
    wgmma_wait<1>();
    keep(dk);
    keep(dv);
    float dq[32];
    issue_query_gradient(buffer, dq);
    wgmma_wait<0>();
    keep(dq);
    keep(s);
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
    float4* to = p.dq + ((head * p.rows_per_head + w.statistics_row + row) * (C::kHeadSize / 4) + warpgroup * 1024 +
                         thread());
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      ptx::add_global(to + 128 * m, make_float4(dq[4 * m], dq[4 * m + 1], dq[4 * m + 2], dq[4 * m + 3]));
    }
    stage = next;
    buffer ^= 1;
  }

  // Where this lane's row of a matrix goes: of two steps of 8 queries and the warp's 16 keys.
  __device__ std::uint32_t ds_address() const {
    const int lane = thread() % 32, warp = thread() / 32;
    return ptx::shared_address(shared.ds[buffer].panel[warpgroup]) + (lane / 16 * 8 + lane % 8) * kRowBytes +
           ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  }

  __device__ void store() {
    const Work& w = shared.work;
    auto& staging = shared.out[4 * warpgroup + thread() / 32];
    const int first = warpgroup * kKeys + thread() / 32 * 16;
    const AttentionBackwardProblem& problem = p.problem;
    const int rows = w.stored_keys - first;
    const std::int64_t row = w.k_row + w.first_key + first;
    if (problem.dv.data != nullptr) {
      store_rows<T>(staging, problem.dv.at(w.k_batch, row, w.kv_head), problem.dv.stride_s, static_cast<int>(problem.Dv),
                    rows, dv, 1.0f);
    }
    if (problem.dk.data != nullptr) {
      store_rows<T>(staging, problem.dk.at(w.k_batch, row, w.kv_head), problem.dk.stride_s, static_cast<int>(problem.D),
                    rows, dk, problem.scale);
    }
  }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup;
  RingPosition<kStages> stage;
  int buffer = 0;
  float s[kScores], dk[kAccumulators], dv[kAccumulators];
};

}  // namespace heddle::cuda::sm90::attention_bwd

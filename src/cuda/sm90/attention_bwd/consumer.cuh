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
      ptx::barrier_wait(shared.q_ready[0], 0);
      issue_scores(0);
      float* last = nullptr;  // dQ of the tile before
      int tile = w.first_tile, head = w.kv_head * static_cast<int>(p.problem.G);
#pragma unroll 1
      for (int n = count; n > 0; --n) {
        step(tile * C::kTileQ, n > 1, last);
        last = dq_of(head, tile * C::kTileQ);
        if (++tile == w.first_tile + w.tiles) tile = w.first_tile, ++head;
      }
      float dq[32];
      const int buffer = ds.index ^ 1;
      ptx::barrier_wait(shared.ds_ready[buffer], ds.phase ^ (ds.index == 0));
      issue_query_gradient(buffer, dq);
      wgmma_wait<0>();
      keep(dq);
      add(dq, last);
      if (thread() % 32 == 0) ptx::bulk_wait();
      __syncwarp();
    }
    store();
  }

 private:
  using T = typename C::Element;
  static constexpr int kScores = C::kTileQ / 2, kAccumulators = C::kHeadSize / 2, kSteps = C::kHeadSize / 16;
  static constexpr int kQuerySteps = C::kTileQ / 16;
  // Query rows that dP is computed of at a time: more have no registers.
  static constexpr int kPartQ = 64, kParts = C::kTileQ / kPartQ;
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

  // S^T of a tile: this warpgroup's keys times its rows.
  __device__ void issue_scores(int n) {
    issue_products<C::kTileQ>(shared.k, shared.q[n], 0, s);
  }
  // dP^T of part of a tile: values times rows of dO.
  __device__ void issue_value_scores(int n, int part, float (&dp)[kPartQ / 2]) {
    issue_products<kPartQ>(shared.v, shared.d_o[n], part * kPartQ, dp);
  }
  template <int kRows, class Keys, class Queries>
  __device__ void issue_products(const Keys& keys, const Queries& queries, int row, float (&to)[kRows / 2]) {
    const Swizzled128 a(keys.panel[0][warpgroup * kKeys]), b(queries.panel[0][row]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<T, kRows>::shared_shared(to, a.at(step / 4 * Keys::kPanelBytes + step % 4 * 32),
                                     b.at(step / 4 * Queries::kPanelBytes + step % 4 * 32), step > 0);
    }
    wgmma_commit();
  }

  // Accumulates `pairs`, P^T or dS^T of part of a tile, times its rows of dO or q.
  template <class Queries>
  __device__ void issue_gradient(const std::uint32_t (&pairs)[kQuerySteps][4], const Queries& queries, int part,
                                 float (&to)[kAccumulators]) {
    const Swizzled128 b(queries.panel, Queries::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      const int step = part * kPartQ / 16 + n;
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

  // One query tile, whose scores are under way. Leaves those of the next under way, if `more`; and adds to the tile
  // before what dQ it gets from these keys. So a warpgroup waits for no dS that the other one has just computed: they
  // may be half a tile apart, and one's exponentials run under the other's products.
  __device__ __forceinline__ void step(int row, bool more, float* last) {
    const Work& w = shared.work;
    const int n = stage.index;
    ptx::barrier_wait(shared.d_o_ready[n], stage.phase);
    std::uint32_t pairs_ds[kQuerySteps][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float dp[kPartQ / 2];
      issue_value_scores(n, part, dp);
      if (part == 0) {
        wgmma_wait<1>();
        keep(s);
      }
      auto& x = reinterpret_cast<float(&)[kPartQ / 2]>(s[part * kPartQ / 2]);
      const int key = w.first_key + warpgroup * kKeys, from = row + part * kPartQ;
      if (!attends_all<kPartQ>(p, w, from, key)) mask_band(p, w, from, key, x);
      std::uint32_t pairs[kQuerySteps][4];
      probabilities(n, part, x, pairs);
      issue_gradient(pairs, shared.d_o[n], part, dv);
      if (part == 0) ptx::barrier_wait(shared.ds_free[ds.index], ds.phase ^ 1);
      wgmma_wait<1>();
      keep(dp);
      score_gradients(n, part, x, dp, pairs_ds);
      if (part == kParts - 1) {
        ptx::fence_async_shared();
        __syncwarp();
        if (ptx::elect_one()) ptx::barrier_arrive(shared.ds_ready[ds.index]);
      }
      issue_gradient(pairs_ds, shared.q[n], part, dk);
    }

    // dQ of the tile before; at the first tile this one's, for nothing.
    const bool first = last == nullptr;
    const int buffer = first ? 0 : ds.index ^ 1;
    ptx::barrier_wait(shared.ds_ready[buffer], first ? 0 : ds.phase ^ (ds.index == 0));
    float dq[32];
    issue_query_gradient(buffer, dq);
    wgmma_wait<1>();
    keep(dk);
    keep(dv);
    if (ptx::elect_one()) ptx::barrier_arrive(shared.free[n]);
    // After the last tile, one that is there already is computed once more, for nothing.
    const RingPosition<kStages> current = stage;
    stage.next();
    const int following = more ? stage.index : n;
    ptx::barrier_wait(shared.q_ready[following], more ? stage.phase : current.phase);
    issue_scores(following);
    wgmma_wait<1>();
    keep(dq);
    if (!first) {
      if (ptx::elect_one()) ptx::barrier_arrive(shared.ds_free[buffer]);
      add(dq, last);
    }
    ds.next();
    wgmma_wait<0>();  // under way from one round of the loop to the next, products would be serialised
    keep(s);
  }

  // Where this warp's 16 rows of the warpgroup's block of dQ are summed.
  __device__ float* dq_of(int head, int row) const {
    return p.dq + ((head * p.rows_per_head + shared.work.statistics_row + row) * C::kHeadSize + warpgroup * 4096 +
                   thread() / 32 * 1024);
  }
  // Through shared memory, for the copying engine to add: added from the registers, they would hold up what the warp
  // wants of shared memory.
  __device__ void add(const float (&dq)[32], float* to) {
    float* const staging = shared.staging[4 * warpgroup + thread() / 32].dq;
    const bool elected = thread() % 32 == 0;  // always the same thread: it waits for what it has committed
    if (elected) ptx::bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      reinterpret_cast<float4*>(staging)[32 * m + thread() % 32] =
          make_float4(dq[4 * m], dq[4 * m + 1], dq[4 * m + 2], dq[4 * m + 3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (elected) {
      ptx::bulk_add(to, staging, 1024 * sizeof(float));
      ptx::bulk_commit();
    }
  }

  // x: scores of part of a tile, which become probabilities. pairs: those rounded, of its steps.
  __device__ __forceinline__ void probabilities(int n, int part, float (&x)[kPartQ / 2],
                                                std::uint32_t (&pairs)[kQuerySteps][4]) {
    const float* lse = shared.lse[n] + part * kPartQ + first_query();
#pragma unroll
    for (int j = 0; j < kPartQ / 8; ++j) {
      const float2 base = *reinterpret_cast<const float2*>(lse + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        x[i] = ptx::exp2_approx(fmaf(x[i], p.scale_log2, -base.x));
        x[i + 1] = ptx::exp2_approx(fmaf(x[i + 1], p.scale_log2, -base.y));
        pairs[part * kPartQ / 16 + j / 2][j % 2 * 2 + r] = ptx::pack2<T>(x[i], x[i + 1]);
      }
    }
  }

  // dS = P (dP - delta) of part of a tile: rounded, and in shared memory too.
  __device__ __forceinline__ void score_gradients(int n, int part, const float (&x)[kPartQ / 2],
                                                  const float (&dp)[kPartQ / 2],
                                                  std::uint32_t (&pairs)[kQuerySteps][4]) {
    const float* delta = shared.delta[n] + part * kPartQ + first_query();
    const std::uint32_t to = ds_address();
#pragma unroll
    for (int j = 0; j < kPartQ / 8; ++j) {
      const float2 base = *reinterpret_cast<const float2*>(delta + 8 * j);
      const int step = part * kPartQ / 16 + j / 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        pairs[step][j % 2 * 2 + r] = ptx::pack2<T>(x[i] * (dp[i] - base.x), x[i + 1] * (dp[i + 1] - base.y));
      }
      if (j % 2 == 1) ptx::store_matrix_x4_transposed(to + step * (16 * kRowBytes), pairs[step]);
    }
  }

  // Where this lane's row of a matrix goes: of two steps of 8 queries and the warp's 16 keys.
  __device__ std::uint32_t ds_address() const {
    const int lane = thread() % 32, warp = thread() / 32;
    return ptx::shared_address(shared.ds[ds.index].panel[warpgroup]) + (lane / 16 * 8 + lane % 8) * kRowBytes +
           ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  }

  __device__ void store() {
    const Work& w = shared.work;
    auto& staging = shared.staging[4 * warpgroup + thread() / 32].rows;
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
  RingPosition<2> ds;
  float s[kScores], dk[kAccumulators], dv[kAccumulators];
};

}  // namespace heddle::cuda::sm90::attention_bwd

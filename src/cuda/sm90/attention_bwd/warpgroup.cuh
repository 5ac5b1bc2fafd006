// What every consuming warpgroup can do. Keys are on M: S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
// operands in registers as they come, for dV += P^T dO and dK += dS^T Q. Only dS goes through shared memory, for dQ =
// dS K.
#pragma once

#include "cuda/common/attention/log2.h"
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/attention_bwd/closed_keys.cuh"
#include "cuda/sm90/attention_bwd/epilogue.cuh"
#include "cuda/sm90/attention_bwd/producer.cuh"
#include "cuda/sm90/attention_bwd/score_options.cuh"

namespace heddle::cuda::sm90::attention_bwd {

template <class C>
class Warpgroup {
 protected:
  using T = typename C::Element;
  static constexpr int kScores = C::kTileQ / 2, kAccumulators = C::kHeadSize / 2, kSteps = C::kHeadSize / 16;
  static constexpr int kQuerySteps = C::kTileQ / 16;
  static constexpr std::uint32_t kRowBytes = kPanel * sizeof(T);  // of a panel
  // Query rows that dP is computed of at a time: more have no registers.
  static constexpr int kPartQ = 64, kParts = C::kTileQ / kPartQ;
  using Scores = float[kScores];
  using Part = float[kPartQ / 2];
  using Accumulators = float[kAccumulators];
  using Pairs = std::uint32_t[kQuerySteps][4];  // P^T or dS^T of a tile, rounded: operands of its steps
  using Block = float[32];                      // 64 rows and 64 columns of dQ

  __device__ Warpgroup(const Params& params, SharedMemory<C>& memory, int number)
      : p(params), shared(memory), warpgroup(number), key_row(C::kSplit ? 0 : number * kKeys) {}

  __device__ static int thread() { return recomputed(static_cast<int>(threadIdx.x)) % 128; }

  __device__ static void clear(Accumulators& x) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) x[i] = 0.0f;
  }

  // Keys and values that nobody attends become zeros: dS is zero for them, but zero times NaN is not.
  __device__ void prepare_keys() {
    const Work& w = shared.work;
    ptx::barrier_wait(shared.k_ready, 0);
    ptx::barrier_wait(shared.v_ready, 0);
    if constexpr (C::kListed) {
      clear_other_keys();
    } else {
      if (C::kOption != Option::kPlanes && w.begin == 0 && w.keys == C::kTileK) return;
      const int thread = static_cast<int>(threadIdx.x) - 128;
      for (auto* tile : {&shared.k, &shared.v}) {
        clear_rows(*tile, 0, w.begin, thread, 128 * kConsumers);
        clear_rows(*tile, w.keys, C::kTileK, thread, 128 * kConsumers);
      }
    }
    if constexpr (C::kOption == Option::kPlanes) {
      consumers_meet();
      clear_closed_keys(p, shared);
    }
    ptx::fence_async_shared();
    consumers_meet();
  }

  // Those that no row of the listed tiles meets.
  __device__ void clear_other_keys() {
    const int thread = static_cast<int>(threadIdx.x) - 128;
#pragma unroll 1
    for (int first = 0; first < C::kTileK; first += 32) {
#pragma unroll 1
      for (std::uint32_t others = ~shared.met_keys[first / 32]; others != 0; others &= others - 1) {
        const int key = first + __ffs(static_cast<int>(others)) - 1;
        clear_rows(shared.k, key, key + 1, thread, 128 * kConsumers);
        clear_rows(shared.v, key, key + 1, thread, 128 * kConsumers);
      }
    }
  }

  // This warpgroup's keys (values) times kRows rows of q (dO) from `row` on.
  template <int kRows, class Keys, class Queries>
  __device__ void issue_products(const Keys& keys, const Queries& queries, int row, float (&to)[kRows / 2]) {
    const Swizzled128 a(keys.panel[0][key_row]), b(queries.panel[0][row]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<T, kRows>::shared_shared(to, a.at(step / 4 * Keys::kPanelBytes + step % 4 * 32),
                                     b.at(step / 4 * Queries::kPanelBytes + step % 4 * 32), step > 0);
    }
    wgmma_commit();
  }

  // Accumulates `pairs` of part of a tile times its rows of dO or q.
  template <class Queries>
  __device__ void issue_gradient(const Pairs& pairs, const Queries& queries, int part, Accumulators& to) {
    const Swizzled128 b(queries.panel, Queries::kPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kPartQ / 16; ++n) {
      const int step = part * kPartQ / 16 + n;
      Wgmma<T, C::kHeadSize>::template registers_shared<true>(to, pairs[step], b.at(step * 16 * kRowBytes), true);
    }
    wgmma_commit();
  }

  // A block of dQ: rows from `row` on, dims of this panel.
  __device__ void issue_query_gradient(int buffer, int row, int panel, Block& dq) {
    const Swizzled128 a(shared.ds[buffer].panel[0][row]), b(shared.k.panel[panel]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      Wgmma<T, 64>::template shared_shared<true>(
          dq, a.at(step / 4 * Tile<T, C::kTileQ, C::kTileK>::kPanelBytes + step % 4 * 32), b.at(step * 16 * kRowBytes),
          step > 0);
    }
    wgmma_commit();
  }

  // Two neighbours of an array in shared memory. Under a softcap read where they are used, not before: the compiler
  // would else load them ahead, into registers that there are not.
  __device__ static float2 two_of(const float* x) {
    if constexpr (C::kOption == Option::kSoftcap) {
      const volatile float* now = x;
      return make_float2(now[0], now[1]);
    } else {
      return *reinterpret_cast<const float2*>(x);
    }
  }

  // x: scores of part of a tile, of whose query rows the first is `row`; they become probabilities, under a softcap
  // with the factors of dS. pairs: the probabilities, rounded. stage: of the tile.
  __device__ __forceinline__ void probabilities(int stage, int head, int row, int part, Part& x, Pairs& pairs) {
    const Work& w = shared.work;
    const float* lse = shared.lse[stage];
    int key = w.first_key + key_row;
    if constexpr (C::kHasParts) {
      // A bool that was found earlier would take the register that there is not.
      const volatile bool& named = shared.named[stage][warpgroup];
      if (!named) key = w.first_key + C::kTileK;
    }
    row += part * kPartQ;
    if constexpr (C::kOption == Option::kPlanes) {
      apply_planes<C>(p, w, head, row + first_query(), key + first_key_of_warpgroup(), x);
    }
    if (!attends_all<kPartQ>(p, w, row, key)) mask_band(p, w, row, key, x);
    lse += part * kPartQ + first_query();
#pragma unroll
    for (int j = 0; j < kPartQ / 8; ++j) {
      float2 base = two_of(lse + 8 * j);
      if constexpr (C::kOption == Option::kPlanes) {
        if (p.largest != nullptr) {
          const std::int64_t first = head * p.rows_per_head + w.statistics_row + row + first_query() + 8 * j;
          take_large_rows(p.largest + first, base, reinterpret_cast<float(&)[4]>(x[4 * j]));
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float(&pair)[2] = reinterpret_cast<float(&)[2]>(x[4 * j + 2 * r]);
        float derivative[2] = {1.0f, 1.0f};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float subtract = c == 0 ? base.x : base.y;
          if constexpr (C::kOption == Option::kNone) {
            pair[c] = ptx::exp2_approx(fmaf(pair[c], p.scale_log2, -subtract));
          } else if constexpr (C::kOption == Option::kSoftcap) {
            pair[c] = ptx::exp2_approx(cap_softly(p, pair[c], derivative[c]) - subtract);
          } else {
            pair[c] = ptx::exp2_approx(fmaf(pair[c], kLog2e, -subtract));
          }
        }
        pairs[part * kPartQ / 16 + j / 2][j % 2 * 2 + r] = ptx::pack2<T>(pair[0], pair[1]);
        if constexpr (C::kOption == Option::kSoftcap) pair[0] *= derivative[0], pair[1] *= derivative[1];
      }
    }
  }

  // dS = P (dP - delta) of part of a tile: rounded, and in shared memory too. probability(i): of registers i and i + 1.
  template <class Probability>
  __device__ __forceinline__ void score_gradients(const float* delta, int part, int buffer, const Part& dp,
                                                  const Probability& probability, Pairs& pairs) {
    delta += part * kPartQ + first_query();
    const int lane = thread() % 32, warp = thread() / 32;
    // Where this lane's row of a matrix goes: of two steps of 8 queries and the warp's 16 keys.
    const std::uint32_t to = ptx::shared_address(shared.ds[buffer].panel[key_row / kKeys]) +
                             (lane / 16 * 8 + lane % 8) * kRowBytes + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (int j = 0; j < kPartQ / 8; ++j) {
      const float2 base = *reinterpret_cast<const float2*>(delta + 8 * j);
      const int step = part * kPartQ / 16 + j / 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float2 x = probability(i);
        pairs[step][j % 2 * 2 + r] = ptx::pack2<T>(x.x * (dp[i] - base.x), x.y * (dp[i + 1] - base.y));
      }
      if (j % 2 == 1) ptx::store_matrix_x4_transposed(to + step * (16 * kRowBytes), pairs[step]);
    }
  }

  // Makes this warp's stores to shared memory known to products, and tells so.
  __device__ static void publish(ptx::Barrier& barrier) {
    planted_pause(Plant::unawaited_gradients, true);
    ptx::fence_async_shared();
    __syncwarp();
    if (ptx::elect_one()) ptx::barrier_arrive(barrier);
  }

  // Where this warp's 16 rows of block `number` of a tile of dQ are summed.
  __device__ float* sum_of(int head, int tile, int number) const {
    const std::int64_t row = head * p.rows_per_head + shared.work.statistics_row + tile * C::kTileQ;
    return p.dq + (row * C::kColumns + number * (64 * 64) + thread() / 32 * (16 * 64));
  }
  // Has a block of dQ added by the copying engine: added from the registers, it would hold up what the warps want of
  // shared memory. Deterministic sums: by the threads that wait for turns. parity: of the tile, in this CTA's order.
  __device__ void add(const Block& dq, float* sum, int parity) {
    auto& staging = shared.staging[4 * warpgroup + thread() / 32].dq;
    await_staging();
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      reinterpret_cast<float4*>(staging)[32 * m + thread() % 32] =
          make_float4(dq[4 * m], dq[4 * m + 1], dq[4 * m + 2], dq[4 * m + 3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (thread() % 32 == 0) {  // always the same thread: it waits for what it has committed
      if (p.turns == nullptr) {
        ptx::bulk_add(sum, staging, sizeof(staging));
        ptx::bulk_commit();
      } else {
        ptx::barrier_arrive(shared.staged[warpgroup][parity]);
      }
    }
    handed_over ^= 1;
  }
  // Waits until what was added last has left shared memory.
  __device__ void await_staging() {
    if (p.turns != nullptr) {
      ptx::barrier_wait(shared.staging_free[warpgroup], handed_over ^ 1);
    } else if (thread() % 32 == 0) {
      ptx::bulk_wait_read();
    }
    __syncwarp();
  }

  // dK or dV of this warpgroup's keys, or this CTA's part of its sum. size: dims that exist.
  __device__ void store(const Operand& to, float* sums, std::int64_t size, const Accumulators& x, float factor) {
    if (to.data == nullptr) return;
    const Work& w = shared.work;
    const int warp = thread() / 32, first = key_row + 16 * warp;
    if (p.parts == 1) {
      std::byte* const rows = to.at(w.k_batch, w.k_row + w.first_key + first, w.kv_head);
      if (to.dtype == DType::f32) {
        store_floats(rows, to.stride_s, static_cast<int>(size), w.stored_keys - first, x, factor, p.problem.accumulate);
      } else {
        store_rows<T>(shared.staging[4 * warpgroup + warp].rows, rows, to.stride_s, static_cast<int>(size),
                      w.stored_keys - first, x, factor);
      }
      return;
    }
    const std::int64_t row =
        (w.part * p.problem.Hkv + w.kv_head) * p.key_rows_per_head + w.key_sums_row + w.first_key + key_row;
    auto* const words = reinterpret_cast<float4*>(sums + row * C::kColumns) + warp * 256 + thread() % 32;
#pragma unroll
    for (int m = 0; m < kAccumulators / 4; ++m) {
      words[m / 8 * 1024 + m % 8 * 32] = make_float4(x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3]);
    }
  }

  const Params& p;
  SharedMemory<C>& shared;
  const int warpgroup, key_row;
  std::uint32_t handed_over = 0;  // blocks, modulo 2
};

}  // namespace heddle::cuda::sm90::attention_bwd

// From q, k, d_o and v of a tile to P and dS, as the definition of attention has them. A warp's share of the
// scores is C::Scores.
#pragma once

#include "cuda/any/attention_bwd_rows/large_rows.cuh"
#include "cuda/common/attention/log2.h"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm80/attention/scores.cuh"
#include "cuda/sm80/attention_bwd/products_16bit.cuh"
#include "cuda/sm80/attention_bwd/products_tf32.cuh"
#include "cuda/sm80/attention_bwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// Calls visit(g, n, i) for each element of a warp's scores.
template <class C, class Visit>
__device__ inline void for_each_pair(Visit visit) {
#pragma unroll
  for (int g = 0; g < C::Scores::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Scores::kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(g, n, i);
    }
  }
}

// Which pairs dropout keeps: bit 4 n + i of a group's word.
template <class C>
__device__ inline void draw_kept(const Params& p, const Work& w, int row, int key,
                                 std::uint32_t (&kept)[C::Scores::kGroups]) {
  static_assert(C::Scores::kBlocks <= 8);
#pragma unroll
  for (int g = 0; g < C::Scores::kGroups; ++g) {
    kept[g] = 0;
#pragma unroll
    for (int n = 0; n < C::Scores::kBlocks; ++n) {
      kept[g] |= attention::kept_pairs(p.scores, w.scores, row + kGroupRows * g, key + 8 * n) << 4 * n;
    }
  }
}

// Derivative of softcap * tanh(scale * x / softcap) with respect to scale * x. to_exponent: 2 log2(e) scale / softcap.
template <class C>
__device__ inline float softcap_slope(float x, float to_exponent) {
  if constexpr (Float32<C>) {
    const float t = tanhf(x * (to_exponent * (0.5f / kLog2e)));
    return fmaf(-t, t, 1.0f);
  } else {
    const float r = __fdividef(1.0f, 1.0f + ptx::exp2_approx(x * to_exponent));  // (1 - tanh) / 2
    return 4.0f * r * (1.0f - r);
  }
}

// Whether every row of a query tile attends every key of the CTA's, by lengths, causality and window. Rows that do not
// exist have no bias or mask to read; without, they are rows without keys and harmless.
template <class C>
__device__ inline bool attends_wholly(const Params& p, const Work& w, int tile) {
  const int first = tile * C::kTileQ, last = min(first + C::kTileQ, w.scores.sq) - 1, off = w.scores.off;
  if (p.scores.stepped) {
    return w.first_key + C::kTileK <= w.scores.sk && first + C::kTileQ <= w.scores.sq &&
           band_of(p.scores, w.scores).whole({first, last + 1}, {w.first_key, w.first_key + C::kTileK});
  }
  return w.first_key + C::kTileK <= w.scores.sk && last + off - p.scores.left <= w.first_key &&
         first + off + p.scores.right >= w.first_key + C::kTileK - 1 &&
         (!C::kScoreOptions || first + C::kTileQ <= w.scores.sq);
}

// The sums of P and dS of one warp on their way: from raw products to what the definition of attention says.
template <class C>
struct Pairs {
  const Params& p;
  const Work& w;
  const int tile;
  const unsigned warp, lane;
  const bool whole;
  const int row, key;  // of this lane's first element
  float lse[C::Scores::kGroups][2], delta[C::Scores::kGroups][2];
  std::uint32_t kept[C::Scores::kGroups];  // by dropout

  __device__ Pairs(const Params& params, const Work& work, int q_tile, const SharedMemory<C>& rows)
      : p(params),
        w(work),
        tile(q_tile),
        warp(threadIdx.x / 32),
        lane(recomputed_by_tile(threadIdx.x % 32, q_tile)),
        whole(attends_wholly<C>(p, w, tile)),
        row(tile * C::kTileQ + static_cast<int>(C::Scores::first_row(warp) + lane / 4)),
        key(w.first_key + static_cast<int>(C::Scores::first_column(warp) + 2 * (lane % 4))) {
    const unsigned first = C::Scores::first_row(warp) + lane / 4;
#pragma unroll
    for (int g = 0; g < C::Scores::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse[g][r] = rows.lse_log2[first + kGroupRows * g + 8 * r];
        delta[g][r] = rows.delta[first + kGroupRows * g + 8 * r];
      }
    }
  }

  __device__ bool drops() const { return C::kScoreOptions && p.scores.drop_below > 0; }

  // What the sums of dP begin with. Beginning at -delta, they come out as dP - delta. Under dropout they begin at 0,
  // since dP must be scaled before delta is taken off.
  __device__ void begin_dp(typename C::Scores::Sums& dp) const {
    for_each_pair<C>([&](int g, int n, int i) { dp[g][n][i] = drops() ? 0.0f : -delta[g][i / 2]; });
  }

  // dP - delta with dropout, and what the softcap makes of a gradient. s: raw products.
  __device__ void finish_dp(const typename C::Scores::Sums& s, typename C::Scores::Sums& dp, bool through_softcap) {
    if (drops()) {
      draw_kept<C>(p, w, row, key, kept);
      for_each_pair<C>([&](int g, int n, int i) {
        const float x = (kept[g] >> (4 * n + i) & 1) != 0 ? dp[g][n][i] * p.keep_scale : 0.0f;
        dp[g][n][i] = x - delta[g][i / 2];
      });
    }
    const float softcap = p.scores.problem.softcap;
    if (through_softcap && softcap > 0) {
      const float to_exponent = 2 * p.scores.scale_log2 / softcap;
      for_each_pair<C>([&](int g, int n, int i) { dp[g][n][i] *= softcap_slope<C>(s[g][n][i], to_exponent); });
    }
  }

  // For large rows (docs/glossary.md): lse and scores become relative to the row's largest score.
  __device__ void take_large_rows(typename C::Scores::Sums& s) {
    using namespace any::attention_bwd_rows;
    bool any = false;
#pragma unroll
    for (int g = 0; g < C::Scores::kGroups; ++g) any |= is_large_row(lse[g][0]) || is_large_row(lse[g][1]);
    if (!__any_sync(0xffffffff, any)) return;
#pragma unroll
    for (int g = 0; g < C::Scores::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_large_row(lse[g][r])) continue;
        const float base = p.largest[w.scores.h * p.rows_per_head + w.stored_row + row + kGroupRows * g + 8 * r];
        lse[g][r] = log2_sum_of_large_row(lse[g][r]);
#pragma unroll
        for (int n = 0; n < C::Scores::kBlocks; ++n) {
          s[g][n][2 * r] -= base;
          s[g][n][2 * r + 1] -= base;
        }
      }
    }
  }

  // Raw products to P, without dropout. attended: this lane's word for its keys.
  __device__ void finish_p(typename C::Scores::Sums& s, std::uint32_t& attended) {
    using Warp = typename C::WarpScores;
    if constexpr (C::kScoreOptions) attention::scale_scores<Warp>(p.scores, w.scores, row + w.far, key, s);
    if (!whole) attention::mask_band<Warp>(p.scores, w.scores, {0, w.scores.sk}, row, key, s);
    if constexpr (C::kScoreOptions) {
      const AttentionProblem& a = p.scores.problem;
      const bool planes = a.bias.data != nullptr || a.mask.data != nullptr;
      if (planes) {
        attention::add_planes<Warp>(p.scores, w.scores, whole && w.key_offset % 2 == 0, row, key + w.key_offset, s);
      }
      attended = planes || !whole ? attended_keys(s) : ~0u;
      if (p.largest != nullptr) take_large_rows(s);
    }
    const float scale = C::kScoreOptions ? kLog2e : p.scores.scale_log2;
    for_each_pair<C>(
        [&](int g, int n, int i) { s[g][n][i] = ptx::exp2_approx(fmaf(s[g][n][i], scale, -lse[g][i / 2])); });
  }

  // dS from P and dP. A pair without probability has no gradient, whatever its key and value hold.
  __device__ void finish_ds(typename C::Scores::Sums& s, typename C::Scores::Sums& dp) const {
    if (C::kScoreOptions || !whole) {
      for_each_pair<C>([&](int g, int n, int i) {
        if (s[g][n][i] == 0.0f) dp[g][n][i] = 0.0f;
      });
    }
    for_each_pair<C>([&](int g, int n, int i) { dp[g][n][i] *= s[g][n][i]; });
    if (drops()) {
      for_each_pair<C>([&](int g, int n, int i) {
        if ((kept[g] >> (4 * n + i) & 1) == 0) s[g][n][i] = 0.0f;
      });
    }
  }
};

// P (in s) and dS (in ds) of a tile that lies in shared memory. kThroughSoftcap: dS is with respect to scale * q . k;
// else to the finished scores. parity: of the step.
template <class C, bool kThroughSoftcap>
__device__ inline void compute_pairs(const Params& p, const Work& w, int tile, int parity, typename C::Scores::Sums& s,
                                     typename C::Scores::Sums& ds, SharedMemory<C>& shared) {
  Pairs<C> pairs(p, w, tile, shared);
  const unsigned row0 = C::Scores::first_row(pairs.warp), key0 = C::Scores::first_column(pairs.warp);
  const AttentionProblem& a = p.scores.problem;
  const auto at = [](const auto& tile, unsigned row) { return ptx::shared_address(&tile) + row * C::kPitch; };
  const auto multiply_qk = [&] {
    for_each_pair<C>([&](int g, int n, int i) { s[g][n][i] = 0.0f; });
    multiply_by_transposed<C>(s, at(shared.q, row0), at(shared.k, key0), pairs.lane, static_cast<int>(a.D));
  };
  const auto multiply_dov = [&] {
    pairs.begin_dp(ds);
    multiply_by_transposed<C>(ds, at(shared.d_o, row0), at(shared.v, key0), pairs.lane, static_cast<int>(a.Dv));
  };
  std::uint32_t attended = ~0u;
  if constexpr (C::kScoreOptions) {
    // The softcap's derivative needs the raw products and the finished dP at the same time.
    multiply_dov();
    multiply_qk();
    pairs.finish_dp(s, ds, kThroughSoftcap);
    pairs.finish_p(s, attended);
    constexpr std::uint32_t kMine = C::Scores::kBlocks < 16 ? (1u << 2 * C::Scores::kBlocks) - 1 : ~0u;
    if (pairs.lane < 4) atomicOr(&shared.attended[parity][pairs.lane], (attended & kMine) << key0 / 4);
  } else {
    // Exponentials are computed while the tensor cores multiply.
    multiply_qk();
    pairs.finish_p(s, attended);
    multiply_dov();
  }
  pairs.finish_ds(s, ds);
}

template <class C, class Shared>
__device__ inline void store_pairs(const typename C::Scores::Sums& s, const typename C::Scores::Sums& ds, int tile,
                                   Shared& shared) {
  const unsigned warp = threadIdx.x / 32, lane = recomputed_by_tile(threadIdx.x % 32, tile);
  auto *const p = reinterpret_cast<std::byte*>(&shared.p), *const d = reinterpret_cast<std::byte*>(&shared.ds);
#pragma unroll
  for (int g = 0; g < C::Scores::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Scores::kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned row = C::Scores::first_row(warp) + lane / 4 + kGroupRows * g + 8 * r;
        const unsigned column = C::Scores::first_column(warp) + 8 * n + 2 * (lane % 4);
        store_pair<C>(p, row, column, s[g][n][2 * r], s[g][n][2 * r + 1]);
        store_pair<C>(d, row, column, ds[g][n][2 * r], ds[g][n][2 * r + 1]);
      }
    }
  }
}

}  // namespace heddle::cuda::sm80::attention_bwd

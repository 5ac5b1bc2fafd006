// From q, k, d_o and v of a tile to P and dS, as the definition of attention has them. The scores come from the
// forward's functions; a warp's share is C::Scores.
#pragma once

#include "cuda/sm80/attention_bwd/products_16bit.cuh"
#include "cuda/sm80/attention_bwd/products_tf32.cuh"
#include "cuda/sm80/attention_bwd/schedule.cuh"
#include "cuda/sm80/attention_fwd/scores.cuh"

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
      kept[g] |= attention_fwd::kept_pairs(p.scores, w.scores, row + kGroupRows * g, key + 8 * n) << 4 * n;
    }
  }
}

// Derivative of softcap * tanh(scale * x / softcap) with respect to scale * x. to_exponent: 2 log2(e) scale / softcap.
template <class C>
__device__ inline float softcap_slope(float x, float to_exponent) {
  if constexpr (Float32<C>) {
    const float t = tanhf(x * (to_exponent * (0.5f / attention_fwd::kLog2e)));
    return fmaf(-t, t, 1.0f);
  } else {
    const float r = __fdividef(1.0f, 1.0f + ptx::exp2_approx(x * to_exponent));  // (1 - tanh) / 2
    return 4.0f * r * (1.0f - r);
  }
}

// Raw products to P, with dropout, and dS; dP arrives with delta already taken off unless there is dropout.
// kThroughSoftcap: dS is with respect to scale * q . k; else to the finished scores. parity: of the step.
template <class C, bool kThroughSoftcap>
__device__ inline void finish_scores(const Params& p, const Work& w, int tile, int parity,
                                     const float (&lse)[C::Scores::kGroups][2],
                                     const float (&delta)[C::Scores::kGroups][2], typename C::Scores::Sums& s,
                                     typename C::Scores::Sums& dp, SharedMemory<C>& shared) {
  using Warp = typename C::WarpScores;
  const unsigned warp = threadIdx.x / 32, lane = recomputed(threadIdx.x % 32, tile);
  const int first = tile * C::kTileQ, key0 = static_cast<int>(C::Scores::first_column(warp));
  const int row = first + static_cast<int>(C::Scores::first_row(warp) + lane / 4);
  const int key = w.first_key + key0 + static_cast<int>(2 * (lane % 4));
  const AttentionProblem& a = p.scores.problem;
  // Whether every row of the tile attends every key; rows that do not exist have no bias or mask to read.
  const int last = min(first + C::kTileQ, w.scores.sq) - 1;
  const bool whole = w.first_key + C::kTileK <= w.scores.end && last + w.scores.off - p.scores.left <= w.first_key &&
                     first + w.scores.off + p.scores.right >= w.first_key + C::kTileK - 1 &&
                     (!C::kScoreOptions || first + C::kTileQ <= w.scores.sq);

  std::uint32_t kept[C::Scores::kGroups];
  if constexpr (C::kScoreOptions) {
    if (p.scores.drop_below > 0) {
      draw_kept<C>(p, w, row, key, kept);
      for_each_pair<C>([&](int g, int n, int i) {
        const float x = (kept[g] >> (4 * n + i) & 1) != 0 ? dp[g][n][i] * p.keep_scale : 0.0f;
        dp[g][n][i] = x - delta[g][i / 2];
      });
    }
    if (kThroughSoftcap && a.softcap > 0) {
      const float to_exponent = 2 * p.scores.scale_log2 / a.softcap;
      for_each_pair<C>([&](int g, int n, int i) { dp[g][n][i] *= softcap_slope<C>(s[g][n][i], to_exponent); });
    }
    attention_fwd::scale_scores<Warp>(p.scores, w.scores, row, key, s);
  }
  if (!whole) attention_fwd::mask_band<Warp>(p.scores, w.scores, row, key, s);
  if constexpr (C::kScoreOptions) {
    const bool planes = a.bias.data != nullptr || a.mask.data != nullptr;
    if (planes) attention_fwd::add_planes<Warp>(p.scores, w.scores, whole, row, key, s);
    const std::uint32_t attended = planes || !whole ? attention_fwd::attended_keys<Warp>(s) : ~0u;
    constexpr std::uint32_t kMine = C::Scores::kBlocks < 16 ? (1u << 2 * C::Scores::kBlocks) - 1 : ~0u;
    if (lane < 4) atomicOr(&shared.attended[parity][lane], (attended & kMine) << key0 / 4);
  }
  const float scale = C::kScoreOptions ? 1.0f : p.scores.scale_log2;
  for_each_pair<C>([&](int g, int n, int i) {
    float& x = s[g][n][i];
    x = ptx::exp2_approx(fmaf(x, scale, -lse[g][i / 2]));
  });
  // A pair without probability has no gradient, whatever its key and value hold.
  if (C::kScoreOptions || !whole) {
    for_each_pair<C>([&](int g, int n, int i) {
      if (s[g][n][i] == 0.0f) dp[g][n][i] = 0.0f;
    });
  }
  for_each_pair<C>([&](int g, int n, int i) { dp[g][n][i] *= s[g][n][i]; });
  if constexpr (C::kScoreOptions) {
    if (p.scores.drop_below > 0) {
      for_each_pair<C>([&](int g, int n, int i) {
        if ((kept[g] >> (4 * n + i) & 1) == 0) s[g][n][i] = 0.0f;
      });
    }
  }
}

// P (in s) and dS (in ds) of a tile that lies in shared memory.
template <class C, bool kThroughSoftcap>
__device__ inline void compute_pairs(const Params& p, const Work& w, int tile, int parity, typename C::Scores::Sums& s,
                                     typename C::Scores::Sums& ds, SharedMemory<C>& shared) {
  const unsigned warp = threadIdx.x / 32, lane = recomputed(threadIdx.x % 32, tile);
  const unsigned row0 = C::Scores::first_row(warp), key0 = C::Scores::first_column(warp);
  const AttentionProblem& a = p.scores.problem;
  const auto at = [](const auto& tile, unsigned row) { return ptx::shared_address(&tile) + row * C::kPitch; };
  float lse[C::Scores::kGroups][2], delta[C::Scores::kGroups][2];
#pragma unroll
  for (int g = 0; g < C::Scores::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse[g][r] = shared.lse_log2[row0 + lane / 4 + kGroupRows * g + 8 * r];
      delta[g][r] = shared.delta[row0 + lane / 4 + kGroupRows * g + 8 * r];
    }
  }
  // Sums that begin at -delta are dP - delta; dropout scales dP first.
  const bool from_zero = C::kScoreOptions && p.scores.drop_below > 0;
  for_each_pair<C>([&](int g, int n, int i) {
    s[g][n][i] = 0.0f;
    ds[g][n][i] = from_zero ? 0.0f : -delta[g][i / 2];
  });
  multiply_by_transposed<C>(ds, at(shared.d_o, row0), at(shared.v, key0), lane, static_cast<int>(a.Dv));
  multiply_by_transposed<C>(s, at(shared.q, row0), at(shared.k, key0), lane, static_cast<int>(a.D));
  finish_scores<C, kThroughSoftcap>(p, w, tile, parity, lse, delta, s, ds, shared);
}

template <class C>
__device__ inline void store_pairs(const typename C::Scores::Sums& s, const typename C::Scores::Sums& ds, int tile,
                                   SharedMemory<C>& shared) {
  const unsigned warp = threadIdx.x / 32, lane = recomputed(threadIdx.x % 32, tile);
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

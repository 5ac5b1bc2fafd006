// A warp's 16 * kGroups query rows and what it does with them between the products S = Q K^T and O += P V of a key
// tile: scores, maxima, exponentials. The products are functions: products_{16bit,tf32,int8}.cuh.
#pragma once

#include <cfloat>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm80/attention/scores.cuh"
#include "cuda/sm80/attention_fwd/schedule.cuh"

namespace heddle::cuda::sm80::attention_fwd {

constexpr float kSumStart = 0x1.8p23f;  // of scores that are sums of 8-bit codes (products_int8.cuh)

template <class C>
struct Consumer {
  const Params& p;
  const TileWork<typename C::Walk>& w;
  SharedMemory<C>& shared;
  const unsigned lane, warp_row;

  // Statistics of the rows lane / 4 + 8 r of each group. max is in log2 units, after the scale, or with score options a
  // logit. It begins at the lowest finite number, not at -inf: -inf - -inf would be NaN. sum counts this lane's columns
  // only, and is 0 until a key is met.
  float max[C::kGroups][2], sum[C::kGroups][2];
  float s[C::kGroups][C::kTileK / 8][4];
  float o[C::kGroups][C::kHeadSize / 8][4];
  std::uint32_t q[C::kKeptSteps > 0 ? C::kKeptSteps : 1][C::kGroups][4];
  // Keys that some row of the warp attends, as attended_keys() says. Values of the others may be anything, and
  // 0 * NaN is NaN: products of P and V leave them out.
  std::uint32_t attended = ~0u;
  // With codes of 8 bits: a score in log2 units is (s - kSumStart) * factor, and offset = -kSumStart * factor - max. A
  // lane's columns of a block of keys are one group, which has one scale.
  static constexpr int kBlocks = Int8Qk<C> ? C::kTileK / any::attention_int8_qk::kBlockKeys : 1;
  static constexpr int kColumns = C::kTileK / 8 / kBlocks;  // pairs of columns of a block
  float factor[kBlocks][C::kGroups][2], offset[kBlocks][C::kGroups][2];

  __device__ Consumer(const Params& params, const TileWork<typename C::Walk>& work, SharedMemory<C>& memory)
      : p(params),
        w(work),
        shared(memory),
        lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 * kGroupRows * C::kGroups) {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      max[g][0] = max[g][1] = -FLT_MAX;
      sum[g][0] = sum[g][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < C::kHeadSize / 8; ++n) o[g][n][0] = o[g][n][1] = o[g][n][2] = o[g][n][3] = 0.0f;
    }
  }

  __device__ void finish_scores(int tile) {
    const unsigned lane = recomputed_by_tile(this->lane, tile);
    const int row = w.first + warp_row + lane / 4, key = tile * C::kTileK + 2 * (lane % 4);
    const bool whole = w.walk.whole_tile(tile);
    if constexpr (Int8Qk<C>) find_factors(lane);
    if constexpr (C::kScoreOptions) attention::scale_scores<C>(p, w, row + w.far, key, s);
    if (!whole) attention::mask_band<C>(p, w, w.walk.keys(), row, key, s);
    if constexpr (C::kScoreOptions) {
      attended = ~0u;
      if (p.problem.bias.data != nullptr || p.problem.mask.data != nullptr || p.gaps) {
        attention::add_planes<C>(p, w, whole && w.key_offset % 2 == 0, row, key + w.key_offset, s);
        attended = attended_keys(s);
      }
    }
  }

  __device__ void find_factors(unsigned lane) {
    bool spoiled = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const any::attention_int8_qk::KeyGroup group = shared.scales.k[b][lane % 4];
      spoiled |= group.bad != 0;
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float q = shared.scales.q[warp_row + lane / 4 + kGroupRows * g + 8 * r];
          spoiled |= isnan(q);
          factor[b][g][r] = fmaxf(q * group.scale, FLT_MIN);  // never NaN, and never 0, which -inf is multiplied with
        }
      }
    }
    if (spoiled) spoil_scores(lane);
  }

  // Codes cannot say that a row or key is not finite: its scores become NaN here. What is masked afterwards becomes
  // -inf whatever it was.
  __device__ void spoil_scores(unsigned lane) {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < C::kTileK / 8; ++n) {
        const std::uint32_t bad = shared.scales.k[n / kColumns][lane % 4].bad >> (2 * (n % kColumns));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool bad_row = isnan(shared.scales.q[warp_row + lane / 4 + kGroupRows * g + i / 2 * 8]);
          if (bad_row || (bad >> i % 2 & 1) != 0) s[g][n][i] = NAN;
        }
      }
    }
  }

  // The largest of this lane's columns.
  __device__ float largest(int g, int r, int first, int count) const {
    float top = fmaxf(s[g][first][2 * r], s[g][first][2 * r + 1]);
#pragma unroll
    for (int n = first + 1; n < first + count; ++n) top = fmaxf(top, fmaxf(s[g][n][2 * r], s[g][n][2 * r + 1]));
    return top;
  }

  // Brings the maxima up to date, and makes sums and o relative to them.
  __device__ void rescale() {
    float correction[C::kGroups][2];
    bool changed = false;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = largest(g, r, 0, kColumns);
        if constexpr (Int8Qk<C>) {
          top = (top - kSumStart) * factor[0][g][r];
#pragma unroll
          for (int b = 1; b < kBlocks; ++b) {
            top = fmaxf(top, (largest(g, r, b * kColumns, kColumns) - kSumStart) * factor[b][g][r]);
          }
        }
        top = largest_of_quad(top) * scale();
        const float before = max[g][r];
        if (top > before + kRescaleLog2 / kLog2) max[g][r] = top;
        if constexpr (Int8Qk<C>) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) offset[b][g][r] = fmaf(-kSumStart, factor[b][g][r], -max[g][r]);
        }
        correction[g][r] = ptx::exp2_approx((before - max[g][r]) * kLog2);
        changed |= correction[g][r] != 1.0f;
      }
    }
    // A factor of 1 changes nothing, so a row's bits do not depend on its neighbours.
    if (__any_sync(0xffffffff, changed)) {
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[g][r] *= correction[g][r];
#pragma unroll
        for (int n = 0; n < C::kHeadSize / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[g][n][i] *= correction[g][i / 2];
        }
      }
    }
  }

  // Turns the scores of 16 keys into exp(s - max), some of them dropped.
  __device__ void exponentials(int tile, int step) {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = s[g][2 * step + i / 4][i % 4];
        const int b = (2 * step + i / 4) / kColumns, r = i % 4 / 2;
        x = C::kScoreOptions ? exp_of_difference(x, max[g][r])
            : Int8Qk<C>      ? ptx::exp2_approx(fmaf(x, factor[b][g][r], offset[b][g][r]))
                             : ptx::exp2_approx(fmaf(x, scale(), -max[g][r]));
        sum[g][i % 4 / 2] += x;
      }
    }
    if constexpr (C::kScoreOptions) {
      const unsigned lane = recomputed_by_tile(this->lane, tile);
      if (p.drop_below > 0)
        attention::drop<C>(p, w, w.first + warp_row + lane / 4, tile * C::kTileK + 2 * (lane % 4), step, s);
    }
  }

  // How many log2 units one unit of max is.
  static constexpr float kLog2 = C::kScoreOptions ? kLog2e : 1.0f;

  // What makes scores, as rescale() finds them, units of max.
  __device__ float scale() const { return C::kScoreOptions || Int8Qk<C> ? 1.0f : p.scale_log2; }
};

}  // namespace heddle::cuda::sm80::attention_fwd

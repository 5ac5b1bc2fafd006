// What a warp does with its 16 * kGroups query rows and one key tile: S = Q K^T, softmax, O += P V.
#pragma once

#include <cfloat>

#include "cuda/common/ptx.cuh"
#include "cuda/sm80/attention_fwd/scores.cuh"

namespace heddle::cuda::sm80::attention_fwd {

// O is rescaled only when a row's maximum has grown by more than this (log2): until then P may reach 2^8, which fp32
// sums and 16-bit floats hold as exactly as values below 1. (The conditional rescaling of FlashAttention-4.)
constexpr float kRescaleLog2 = 8;

template <class C>
class Consumer {
 public:
  // Statistics of the rows lane / 4 + 8 r of each group. max is in log2 units, after the scale, and finite: what is
  // subtracted from -inf must not be -inf. sum counts this lane's columns only, and is 0 until a key is met.
  float max[C::kGroups][2], sum[C::kGroups][2];
  float o[C::kGroups][C::kHeadSize / 8][4];

  __device__ Consumer(const Params& params, const Work& work, SharedMemory<C>& memory)
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

  __device__ void multiply_qk(int tile) {
    // Matrices of q: rows 0-7 and 8-15 of 8 dimensions, then of the next 8. Of k: 8 dimensions of keys 0-7, the next 8,
    // then keys 8-15. A step of 16 dimensions is two chunks further, and the swizzle is an exclusive or.
    const unsigned lane = recomputed(this->lane, tile);
    const std::uint32_t q_at = ptx::shared_address(&shared.q) + swizzled(kPitch, warp_row + lane % 16, lane / 16);
    const std::uint32_t k_at =
        ptx::shared_address(&shared.k) + swizzled(kPitch, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int n = 0; n < C::kTileK / 8; ++n) s[g][n][0] = s[g][n][1] = s[g][n][2] = s[g][n][3] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < C::kHeadSize / 16; ++step) {
      std::uint32_t q[C::kGroups][4];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) ptx::load_matrix_x4(q[g], (q_at ^ step << 5) + g * kGroupRows * kPitch);
#pragma unroll
      for (int n = 0; n < C::kTileK / 16; ++n) {
        std::uint32_t k[4];
        ptx::load_matrix_x4(k, (k_at ^ step << 5) + n * 16 * kPitch);
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          ptx::mma_16816<T>(s[g][2 * n], q[g], k[0], k[1]);
          ptx::mma_16816<T>(s[g][2 * n + 1], q[g], k[2], k[3]);
        }
      }
    }
  }

  __device__ void finish_scores(int tile) {
    const unsigned lane = recomputed(this->lane, tile);
    const int row = w.first + warp_row + lane / 4, key = tile * C::kTileK + 2 * (lane % 4);
    const bool whole = w.whole_begin <= tile && tile < w.whole_end;
    if constexpr (C::kScoreOptions) scale_scores<C>(p, w, row, key, s);
    if (!whole) mask_band<C>(p, w, row, key, s);
    if constexpr (C::kScoreOptions) {
      attended = ~0u;
      if (p.problem.bias.data != nullptr || p.problem.mask.data != nullptr) {
        add_planes<C>(p, w, whole, row, key, s);
        attended = attended_keys<C>(s);
      }
    }
  }

  // Brings the maxima up to date, and sums and o to their scale.
  __device__ void rescale() {
    float correction[C::kGroups][2];
    bool changed = false;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(s[g][0][2 * r], s[g][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < C::kTileK / 8; ++n) top = fmaxf(top, fmaxf(s[g][n][2 * r], s[g][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)) * scale();
        const float before = max[g][r];
        if (top > before + kRescaleLog2) max[g][r] = top;
        correction[g][r] = ptx::exp2_approx(before - max[g][r]);
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

  // O += P V. The exponentials of 16 keys are computed while the tensor cores multiply those before.
  __device__ void multiply_pv(int tile) {
    // Matrices of v: 8 columns of keys 0-7 and 8-15, then the next 8.
    const unsigned lane = recomputed(this->lane, tile);
    const std::uint32_t v_at = ptx::shared_address(&shared.v) + swizzled(kPitch, lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < C::kTileK / 16; ++step) {
      exponentials(step);
      if constexpr (C::kScoreOptions) {
        if (p.drop_below > 0) drop<C>(p, w, w.first + warp_row + lane / 4, tile * C::kTileK + 2 * (lane % 4), step, s);
      }
      std::uint32_t probabilities[C::kGroups][4];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &s[g][2 * step + i / 2][i % 2 * 2];
          probabilities[g][i] = ptx::pack2<T>(x[0], x[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kHeadSize / 16; ++n) {
        std::uint32_t v[4];
        ptx::load_matrix_x4_transposed(v, (v_at ^ n << 5) + step * 16 * kPitch);
        if constexpr (C::kScoreOptions) {
          // Values of keys that no row attends may be anything, and 0 * NaN is NaN. A lane's rows of v are its columns
          // of s.
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] &= halves(attended >> (4 * step + i % 2 * 2));
        }
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          ptx::mma_16816<T>(o[g][2 * n], probabilities[g], v[0], v[1]);
          ptx::mma_16816<T>(o[g][2 * n + 1], probabilities[g], v[2], v[3]);
        }
      }
    }
  }

 private:
  using T = typename C::Element;
  static constexpr std::uint32_t kPitch = C::kHeadSize * sizeof(T);

  __device__ float scale() const { return C::kScoreOptions ? 1.0f : p.scale_log2; }

  // Turns the scores of 16 keys into exp2(s - max).
  __device__ void exponentials(int step) {
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = s[g][2 * step + i / 4][i % 4];
        x = ptx::exp2_approx(fmaf(x, scale(), -max[g][i % 4 / 2]));
        sum[g][i % 4 / 2] += x;
      }
    }
  }

  // A word whose low and high half are all ones where bit 0 and bit 1 are set.
  __device__ static std::uint32_t halves(std::uint32_t bits) {
    return ((bits & 1) != 0 ? 0x0000ffffu : 0) | ((bits & 2) != 0 ? 0xffff0000u : 0);
  }

  const Params& p;
  const Work& w;
  SharedMemory<C>& shared;
  const unsigned lane, warp_row;
  std::uint32_t attended = 0;
  float s[C::kGroups][C::kTileK / 8][4];
};

}  // namespace heddle::cuda::sm80::attention_fwd

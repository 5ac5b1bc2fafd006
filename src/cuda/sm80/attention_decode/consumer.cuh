// What a warp does with a tile's query rows and one step of 16 keys: S = Q K^T, softmax, O += P V. Matrix fragments are
// what lanes copied, word by word: which dimensions stand for which k of a product, and which for which n, is free.
#pragma once

#include <cfloat>

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/rows.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/sm80/attention_decode/scores.cuh"

namespace heddle::cuda::sm80::attention_decode {

template <class C>
class Consumer {
  using T = typename C::Element;

 public:
  // Statistics of the rows lane / 4 + 8 r. max is a logit. It begins at the lowest finite number, not at -inf: -inf -
  // -inf would be NaN. sum counts this lane's columns only.
  float max[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {};
  // Element 2 r + c of block kPiece g + j: dimension kPiece (8 g + 2 (lane % 4) + c) + j of row lane / 4 + 8 r.
  float o[C::kHeadSize / 8][4] = {};

  __device__ Consumer(const Params& params, const Extent& extent, const Segment& segment, SharedMemory<C>& memory)
      : p(params),
        s(segment),
        shared(memory),
        scores(params, extent, segment),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int c = 0; c < C::kKeyPieces; ++c) load_query_piece(c, q[c]);
    }
  }

  // The keys from slot `first` on, which are in a stage.
  __device__ void step(int first, int stage) {
    const Stage<C>& keys = shared.stage[warp][stage];
    float factor[2][2], value_factor[2][2], x[2][4];
    load_factors(stage, factor, value_factor);
    multiply_qk(keys, x);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] *= factor[n][i % 2];
    }
    // The usual step as one run of instructions.
    if (scores.plain(first)) {
      rescale(x);
      multiply_pv<true>(keys, 0, value_factor, x);
    } else {
      const std::uint32_t attended = scores.finish(first, x);
      rescale(x);
      multiply_pv<false>(keys, attended, value_factor, x);
    }
  }

 protected:
  // Piece c of a query row, and the same piece of the row 8 further.
  using QueryPiece = std::uint32_t[2][C::kPiece / 2];

  __device__ void load_query_piece(int c, QueryPiece& piece) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* row = &shared.query().row[lane / 4 + 8 * r][C::kPiece * (4 * c + lane % 4)];
#pragma unroll
      for (int n = 0; n < C::kPiece / 8; ++n) {
        const uint4 words = reinterpret_cast<const uint4*>(row)[n];
        piece[r][4 * n] = words.x;
        piece[r][4 * n + 1] = words.y;
        piece[r][4 * n + 2] = words.z;
        piece[r][4 * n + 3] = words.w;
      }
    }
  }

  // What scores and probabilities of the lane's keys are multiplied with.
  __device__ void load_factors(int stage, float (&factor)[2][2], float (&value_factor)[2][2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        factor[n][c] = p.problem.scale;
        value_factor[n][c] = 1.0f;
        if constexpr (C::kE4m3) {
          const StageScales& scales = shared.scales[warp][stage];
          const int key = 8 * n + 2 * (lane % 4) + c;
          if (p.problem.k_scale.data != nullptr) factor[n][c] *= scales.k[key];
          if (p.problem.v_scale.data != nullptr) value_factor[n][c] = scales.v[key];
        }
      }
    }
  }

  __device__ static std::uint32_t word(const uint4& words, int n) {
    return n == 0 ? words.x : n == 1 ? words.y : n == 2 ? words.z : words.w;
  }

  __device__ void multiply_qk(const Stage<C>& keys, float (&x)[2][4]) {
    // Two sums in turn: each product would wait for the one before.
    float sums[2][2][4] = {};
#pragma unroll
    for (int c = 0; c < C::kKeyPieces; ++c) {
      const uint4 k[2] = {keys.k[0][c][lane], keys.k[1][c][lane]};
      QueryPiece fresh;
      if constexpr (!C::kQueryInRegisters) load_query_piece(c, fresh);
      const QueryPiece& piece = C::kQueryInRegisters ? q[C::kQueryInRegisters ? c : 0] : fresh;
#pragma unroll
      for (int n = 0; n < C::kPiece / 4; ++n) {
        const std::uint32_t a[4] = {piece[0][2 * n], piece[1][2 * n], piece[0][2 * n + 1], piece[1][2 * n + 1]};
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          std::uint32_t b0, b1;
          if constexpr (C::kE4m3) {
            widen_e4m3<T>(word(k[block], n), b0, b1);
          } else {
            b0 = word(k[block], 2 * n);
            b1 = word(k[block], 2 * n + 1);
          }
          ptx::mma_16816<T>(sums[n % 2][block], a, b0, b1);
        }
      }
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[block][i] = sums[0][block][i] + sums[1][block][i];
    }
  }

  // Brings the maxima up to date, and sums to their scale. Whether o has to follow, by what factors.
  template <int kBlocks>
  __device__ bool update_maxima(const float (&x)[kBlocks][4], float (&correction)[2]) {
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(x[0][2 * r], x[0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kBlocks; ++n) top = fmaxf(top, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
      top = largest_of_quad(top);
      const float before = max[r];
      if (top > before + kRescaleLog2 / kLog2e) max[r] = top;
      correction[r] = exp_of_difference(before, max[r]);
      changed |= correction[r] != 1.0f;
    }
    if (!__any_sync(0xffffffff, changed)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] *= correction[r];
    return true;
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < C::kHeadSize / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
    }
  }

  __device__ void rescale(const float (&x)[2][4]) {
    float correction[2];
    if (update_maxima(x, correction)) scale_output(correction);
  }

  // attended: as Scores::finish() gives it, unless every key is.
  template <bool kAll>
  __device__ void multiply_pv(const Stage<C>& keys, std::uint32_t attended, const float (&value_factor)[2][2],
                              float (&x)[2][4]) {
    std::uint32_t a[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float y[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          y[c] = exp_of_difference(x[n][2 * r + c], max[r]);
          sum[r] += y[c];
          if constexpr (C::kE4m3) y[c] *= value_factor[n][c];
        }
        a[2 * n + r] = ptx::pack2<T>(y[0], y[1]);
      }
    }
#pragma unroll
    for (int g = 0; g < C::kValuePieces; ++g) {
      uint4 v[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) v[n] = keys.v[n][g][lane];
      if constexpr (!kAll) {
        // Zero times NaN is not zero: values that no row attends must not reach the product.
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if ((attended >> n & 1) == 0) v[n] = uint4{};
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const std::uint32_t w[4] = {word(v[0], n), word(v[1], n), word(v[2], n), word(v[3], n)};
        if constexpr (C::kE4m3) {
          // Bytes: dimensions 4 n .. 4 n + 3 of keys side by side.
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned selector = half == 0 ? 0x5140 : 0x7362;
            std::uint32_t b0[2], b1[2];
            widen_e4m3<T>(__byte_perm(w[0], w[1], selector), b0[0], b0[1]);
            widen_e4m3<T>(__byte_perm(w[2], w[3], selector), b1[0], b1[1]);
            ptx::mma_16816<T>(o[16 * g + 4 * n + 2 * half], a, b0[0], b1[0]);
            ptx::mma_16816<T>(o[16 * g + 4 * n + 2 * half + 1], a, b0[1], b1[1]);
          }
        } else {
          ptx::mma_16816<T>(o[8 * g + 2 * n], a, __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410));
          ptx::mma_16816<T>(o[8 * g + 2 * n + 1], a, __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
        }
      }
    }
  }

  const Params& p;
  const Segment& s;
  SharedMemory<C>& shared;
  const Scores<C> scores;
  const unsigned lane, warp;
  QueryPiece q[C::kQueryInRegisters ? C::kKeyPieces : 1];
};

}  // namespace heddle::cuda::sm80::attention_decode

// From sums to y: the cluster's parts are added up, then scale, bias, activation, residual, one rounding.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/sm90/linear_w4a16/decode.cuh"
#include "cuda/sm90/linear_w4a16/producer.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {

// Adds what the other CTAs of the cluster have of these sums, in the order of their ranks, where this one finishes
// them: a warpgroup's rows are finished by the CTA of rank (warpgroup mod splits). Returns whether that is this one.
// All threads of the cluster.
template <class C>
__device__ inline bool gather_sums(int splits, SharedMemory<C>& shared, int consumer, float (&sums)[C::kAccumulators]) {
  const int thread = static_cast<int>(threadIdx.x) % 128, rank = ptx::cluster_rank(), owner = consumer % splits;
  ptx::cluster_meet();  // no copy is under way, no product reads the stages
  if (owner != rank) {
#pragma unroll
    for (int i = 0; i < C::kAccumulators / 4; ++i) {
      shared.sums[consumer][i][thread] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }
  ptx::cluster_meet();
  if (owner == rank) {
    const std::uint32_t address = ptx::shared_address(&shared.sums[consumer][0][thread]);
#pragma unroll 1
    for (int other = 1; other < splits; ++other) {
      const int next = rank + other < splits ? rank + other : rank + other - splits;
      const std::uint32_t from = ptx::remote_address(address, next);
#pragma unroll
      for (int i = 0; i < C::kAccumulators / 4; ++i) {
        const float4 x = ptx::load_remote_float4(from + i * (128 * sizeof(float4)));
        sums[4 * i] += x.x, sums[4 * i + 1] += x.y, sums[4 * i + 2] += x.z, sums[4 * i + 3] += x.w;
      }
    }
  }
  ptx::cluster_meet();  // what is read remotely stays till then
  return owner == rank;
}

template <class Function>
__device__ inline void for_each(float (&x)[8], Function function) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = function(x[i]);
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

// x: of two blocks of tokens two rows, two tokens each.
__device__ inline void activate(Activation activation, float (&x)[8]) {
  constexpr float kRootOfHalf = 0.70710678f, kTwoRootsOfTwoByPi = 1.59576912f;
  if (activation == Activation::kRelu) {
    for_each(x, [](float y) { return fmaxf(y, 0.0f); });
  } else if (activation == Activation::kGeluErf) {
    for_each(x, [](float y) { return 0.5f * y * (1.0f + erff(y * kRootOfHalf)); });
  } else if (activation == Activation::kGeluTanh) {
    for_each(x, [](float y) { return y / (1.0f + __expf(-kTwoRootsOfTwoByPi * (y + 0.044715f * y * y * y))); });
  } else if (activation == Activation::kSilu) {
    for_each(x, silu);
  } else if (activation == Activation::kSwiglu) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int n = 4 * block; n < 4 * block + 2; ++n) x[n] = x[n + 2] = silu(x[n]) * x[n + 2];  // of both rows the same
    }
  }
}

// What a thread adds to the sums of its two rows.
template <class T>
__device__ inline float2 biases_of(const Params& p, int row) {
  if (p.bias == nullptr) return make_float2(0.0f, 0.0f);
  const T* const from = static_cast<const T*>(p.bias);
  const bool gated = p.activation == Activation::kSwiglu;
  const int first = gated ? row / 16 * 16 + 2 * (row % 16) : row, second = gated ? first + 1 : row + 8;
  const int rows = gated ? 2 * p.n : p.n;
  return make_float2(first < rows ? static_cast<float>(from[first]) : 0.0f,
                     second < rows ? static_cast<float>(from[second]) : 0.0f);
}

template <class C>
__device__ inline void store(const Params& p, const Work& w, SharedMemory<C>& shared, int consumer,
                             const float (&sums)[C::kAccumulators]) {
  using T = typename C::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int first_row = (w.row_block + consumer) * kBlockRows + 16 * warp, row = first_row + lane / 4;
  const bool gated = p.activation == Activation::kSwiglu;
  constexpr float kFactor = 1.0f / (kOperandFactor<T> * kScaleFactor);
  const float scale[2] = {p.row_scales[row] * kFactor, p.row_scales[row + 8] * kFactor};
  const float2 biases = biases_of<T>(p, row);
  auto& staging = shared.staging[4 * consumer + warp];
  // Each lane copies 8 outputs of a token.
  const int token_of_lane = lane / 2, output = (gated ? first_row / 2 : first_row) + lane % 2 * 8;
  const bool exists = output < p.n && !(gated && lane % 2 == 1);
#pragma unroll
  for (int i = 0; i < C::kTokens / 16; ++i) {
    const int token = w.token + 16 * i;
    if (token >= p.m) return;  // one answer in the warp
    const bool mine = exists && token + token_of_lane < p.m;
    // Lanes 0-7 and 16-23 name the tokens of the first 8 outputs, the others those of the next 8.
    const std::uint32_t matrix = ptx::shared_address(&staging[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    auto* const piece = reinterpret_cast<uint4*>(&staging[token_of_lane][lane % 2 * 8]);
    std::uint32_t residual[4] = {0, 0, 0, 0};
    if (p.residual != nullptr) {
      const T* const from = static_cast<const T*>(p.residual) + (token + token_of_lane) * p.residual_stride + output;
      *piece = mine ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      __syncwarp();
      ptx::load_matrix_x4_transposed(residual, matrix);
      __syncwarp();
    }
    // Of two blocks of 8 tokens, two rows, two tokens each.
    float y[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      y[n] = n / 2 % 2 == 0 ? fmaf(sums[8 * i + n], scale[0], biases.x) : fmaf(sums[8 * i + n], scale[1], biases.y);
    }
    activate(p.activation, y);
    std::uint32_t pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 more = ptx::unpack2<T>(residual[n]);
      pairs[n] = ptx::pack2<T>(y[2 * n] + more.x, y[2 * n + 1] + more.y);
    }
    ptx::store_matrix_x4_transposed(matrix, pairs);
    __syncwarp();
    if (mine) {
      *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + (token + token_of_lane) * p.y_stride + output) = *piece;
    }
    __syncwarp();
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

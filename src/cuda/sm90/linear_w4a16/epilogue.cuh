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

__device__ inline void activate(Activation activation, float (&x)[8]) {
  constexpr float kRootOfHalf = 0.70710678f, kTwoRootsOfTwoByPi = 1.59576912f;
  if (activation == Activation::kRelu) {
    for_each(x, [](float y) { return fmaxf(y, 0.0f); });
  } else if (activation == Activation::kGeluErf) {
    for_each(x, [](float y) { return 0.5f * y * (1.0f + erff(y * kRootOfHalf)); });
  } else if (activation == Activation::kGeluTanh) {
    for_each(x, [](float y) { return y / (1.0f + __expf(-kTwoRootsOfTwoByPi * (y + 0.044715f * y * y * y))); });
  } else if (activation == Activation::kSilu) {
    for_each(x, [](float y) { return y / (1.0f + __expf(-y)); });
  }
}

template <class C>
__device__ inline void store(const Params& p, const Work& w, SharedMemory<C>& shared, int consumer,
                             const float (&sums)[C::kAccumulators]) {
  using T = typename C::Element;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int first = (w.row_block + consumer) * kBlockRows + 16 * warp, row = first + lane / 4;
  constexpr float kFactor = 1.0f / (kOperandFactor<T> * kScaleFactor);
  const float scale[2] = {p.row_scales[row] * kFactor, p.row_scales[row + 8] * kFactor};
  float bias[2] = {0.0f, 0.0f};
  if (p.bias != nullptr) {
    const T* const from = static_cast<const T*>(p.bias);
    if (row < p.n) bias[0] = static_cast<float>(from[row]);
    if (row + 8 < p.n) bias[1] = static_cast<float>(from[row + 8]);
  }
  auto& staging = shared.staging[4 * consumer + warp];
  const int token_of_lane = lane / 2, part = lane % 2;
  const bool exists = first + 8 * part < p.n;
#pragma unroll
  for (int i = 0; i < C::kTokens / 16; ++i) {
    const int token = w.token + 16 * i;
    if (token >= p.m) return;  // one answer in the warp
    const bool mine = exists && token + token_of_lane < p.m;
    // Lanes 0-7 and 16-23 name the tokens of the first 8 rows, the others those of the next 8.
    T* const at = &staging[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
    std::uint32_t residual[4] = {0, 0, 0, 0};
    if (p.residual != nullptr) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (mine) {
        words = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.residual) +
                                                (token + token_of_lane) * p.residual_stride + first + 8 * part);
      }
      *reinterpret_cast<uint4*>(&staging[token_of_lane][8 * part]) = words;
      __syncwarp();
      ptx::load_matrix_x4_transposed(residual, ptx::shared_address(at));
      __syncwarp();
    }
    // Of two blocks of 8 tokens, two rows, two tokens each.
    float y[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) y[n] = fmaf(sums[8 * i + n], scale[n / 2 % 2], bias[n / 2 % 2]);
    activate(p.activation, y);
    std::uint32_t pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 more = ptx::unpack2<T>(residual[n]);
      pairs[n] = ptx::pack2<T>(y[2 * n] + more.x, y[2 * n + 1] + more.y);
    }
    ptx::store_matrix_x4_transposed(ptx::shared_address(at), pairs);
    __syncwarp();
    if (mine) {
      *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + (token + token_of_lane) * p.y_stride + first + 8 * part) =
          *reinterpret_cast<const uint4*>(&staging[token_of_lane][8 * part]);
    }
    __syncwarp();
  }
}

}  // namespace heddle::cuda::sm90::linear_w4a16

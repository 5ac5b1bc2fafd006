// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_bwd/bias.cuh"
#include "cuda/sm80/attention_bwd/kernel.cuh"
#include "cuda/sm80/attention_bwd/launch.h"

namespace heddle::cuda::sm80::attention_bwd {

constexpr const char* kOperation = "attention_backward";

template <class C>
void launch(const Params& params, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(params.k_tiles) * params.units;
  start(kOperation, attention_bwd_kernel<C>, {tiles, C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
}

template <class C>
void launch_finish_dq(const Params& params, cudaStream_t stream) {
  const AttentionProblem& a = params.scores.problem;
  const auto tiles = static_cast<unsigned>(params.q_tiles * a.B * a.H);
  start(kOperation, finish_dq_kernel<C>, {tiles, C::kThreads}, stream, params);
}

template <class C>
void launch_dbias(const Params& params, cudaStream_t stream) {
  const std::int64_t tiles = params.bias_batch * params.bias_heads * (params.bias_rows == 1 ? 1 : params.q_tiles) *
                             (params.bias_columns == 1 ? 1 : params.k_tiles);
  start(kOperation, bias_gradient_kernel<C>, {static_cast<unsigned>(tiles), C::kThreads, sizeof(SharedMemory<C>)},
        stream, params);
}

template <class C>
constexpr Variant variant() {
  Variant v{.tile_q = C::kTileQ,
            .tile_k = C::kTileK,
            .head_size = C::kHeadSize,
            .shared_bytes = sizeof(SharedMemory<C>),
            .launch = launch<C>,
            .launch_finish_dq = launch_finish_dq<C>,
            .launch_dbias = nullptr};
  if constexpr (C::kScoreOptions) {
    static_assert(sizeof(SharedMemory<C>) <= kAmpereSharedBytes, "more shared memory than each block can have");
    v.launch_dbias = launch_dbias<C>;
  }
  return v;
}

template <class T, int kHeadSize, Tiling kPlain, Tiling kOptions>
constexpr Variants variants() {
  return {.plain = variant<Config<T, 1, kHeadSize, kPlain, false>>(),
          .options = variant<Config<T, 1, kHeadSize, kOptions, true>>()};
}

// float32: one tiling for all calls.
template <int kProducts, int kHeadSize, Tiling kTiling>
constexpr Variants variants_f32() {
  constexpr Variant kAll = variant<Config<float, kProducts, kHeadSize, kTiling, true>>();
  return {.plain = kAll, .options = kAll};
}

}  // namespace heddle::cuda::sm80::attention_bwd

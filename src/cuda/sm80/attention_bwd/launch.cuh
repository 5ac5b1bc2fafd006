// Starts one instantiation.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_bwd/bias.cuh"
#include "cuda/sm80/attention_bwd/kernel.cuh"
#include "cuda/sm80/attention_bwd/launch.h"

namespace heddle::cuda::sm80::attention_bwd {

constexpr const char* kOperation = "attention_backward";

// Each waits for the grid before it itself: that of the rows, if there are any; not for what clears turns.
inline bool overlaps(const Params& params) { return params.ticket == nullptr && params.scores.problem.q_rows > 0; }

template <class C>
void launch(const Params& params, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(params.k_tiles) * params.units;
  const Grid grid = {
      .blocks = tiles, .threads = C::kThreads, .shared_bytes = sizeof(SharedMemory<C>), .overlaps = overlaps(params)};
  start(kOperation, attention_bwd_kernel<C>, grid, stream, params);
}

template <class C>
void launch_finish_dq(const Params& params, cudaStream_t stream) {
  const AttentionProblem& a = params.scores.problem;
  const auto tiles = static_cast<unsigned>(params.q_tiles * a.B * a.H);
  start(kOperation, finish_dq_kernel<C>, {.blocks = tiles, .threads = C::kThreads, .overlaps = overlaps(params)},
        stream, params);
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
  return {.tile_q = C::kTileQ,
          .tile_k = C::kTileK,
          .head_size = C::kHeadSize,
          .shared_bytes = sizeof(SharedMemory<C>),
          .launch = launch<C>,
          .launch_finish_dq = launch_finish_dq<C>};
}

// Everywhere: a config with all options.
template <class Large, class Plain, class Options, class Everywhere>
constexpr Variants variants_of() {
  static_assert(sizeof(SharedMemory<Everywhere>) <= kAmpereSharedBytes, "more shared memory than each block can have");
  return {.large = variant<Large>(),
          .plain = variant<Plain>(),
          .options = variant<Options>(),
          .everywhere = variant<Everywhere>(),
          .launch_dbias = launch_dbias<Everywhere>};
}

// kOptions: smaller tiles, which leave registers for options.
template <class T, int kHeadSize, Tiling kPlain, Tiling kOptions>
constexpr Variants variants() {
  using Plain = Config<T, 1, kHeadSize, kPlain, false>;
  using Options = Config<T, 1, kHeadSize, kOptions, true>;
  return variants_of<Plain, Plain, Options, Options>();
}

// kLarge, kMedium: tiles that not each GPU has the shared memory for.
template <class T, int kHeadSize, Tiling kLarge, Tiling kMedium, Tiling kEverywhere>
constexpr Variants variants_large() {
  return variants_of<Config<T, 1, kHeadSize, kLarge, false>, Config<T, 1, kHeadSize, kMedium, false>,
                     Config<T, 1, kHeadSize, kMedium, true>, Config<T, 1, kHeadSize, kEverywhere, true>>();
}

// float32: one tiling for all calls.
template <int kProducts, int kHeadSize, Tiling kTiling>
constexpr Variants variants_f32() {
  using All = Config<float, kProducts, kHeadSize, kTiling, true>;
  return variants_of<All, All, All, All>();
}

}  // namespace heddle::cuda::sm80::attention_bwd

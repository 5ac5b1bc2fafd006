// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/attention_bwd/bias.cuh"
#include "cuda/sm80/attention_bwd/kernel.cuh"
#include "cuda/sm80/attention_bwd/variants.h"

namespace heddle::cuda::sm80::attention_bwd {

constexpr const char* kOperation = "attention_backward";

// Whether launches may overlap the grid before them: each then waits for it in the kernel (common/overlap.cuh). Not
// where that clears the turns, or where there is no grid of rows' statistics before.
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
void launch_finish_keys(const Params& params, cudaStream_t stream) {
  const unsigned tiles = 2 * static_cast<unsigned>(params.k_tiles) * params.units / params.splits.divisor;
  start(kOperation, finish_keys_kernel<C>, {.blocks = tiles, .threads = C::kThreads, .overlaps = overlaps(params)},
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
constexpr Variant variant_of() {
  return {.tile_q = C::kTileQ,
          .tile_k = C::kTileK,
          .head_size = C::kHeadSize,
          .shared_bytes = sizeof(SharedMemory<C>),
          .launch = launch<C>,
          .launch_finish_dq = launch_finish_dq<C>,
          .launch_finish_keys = launch_finish_keys<C>};
}

template <DType kType, int kRow>
Variants Instance<kType, kRow>::variant() {
  constexpr Row row = kType == DType::f32 ? kF32Variants[kRow] : k16BitVariants[kRow];
  using T = ElementOf<kType>;
  using Large = Config<T, row.products, row.head, row.tilings.large, row.one_kernel>;
  using Plain = Config<T, row.products, row.head, row.tilings.plain, row.one_kernel>;
  using Options = Config<T, row.products, row.head, row.tilings.options, true>;
  using Everywhere = Config<T, row.products, row.head, row.tilings.everywhere, true>;
  static_assert(sizeof(SharedMemory<Everywhere>) <= kAmpereSharedBytes, "more shared memory than each block can have");
  return {row,
          kType,
          variant_of<Large>(),
          variant_of<Plain>(),
          variant_of<Options>(),
          variant_of<Everywhere>(),
          launch_dbias<Everywhere>};
}

}  // namespace heddle::cuda::sm80::attention_bwd

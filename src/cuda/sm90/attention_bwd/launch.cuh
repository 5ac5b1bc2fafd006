// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/attention_bwd/kernel.cuh"
#include "cuda/sm90/attention_bwd/sums.cuh"
#include "cuda/sm90/attention_bwd/variants.h"

namespace heddle::cuda::sm90::attention_bwd {

// Whether launches may overlap the grid before them: each then waits for it in the kernel (common/overlap.cuh). Not
// where that clears the turns, or where there is no grid of rows' statistics before.
inline bool overlaps(const Params& params) { return params.turns == nullptr && params.problem.q_rows > 0; }

template <class C>
void launch(const Params& params, int grid, cudaStream_t stream) {
  static_assert(sizeof(SharedMemory<C>) <= kHopperSharedBytes, "more shared memory than a block can have");
  const Grid shape = {.blocks = static_cast<unsigned>(grid),
                      .threads = kThreads,
                      .shared_bytes = sizeof(SharedMemory<C>),
                      .overlaps = overlaps(params)};
  start("attention_backward", attention_bwd_kernel<C>, shape, stream, params);
}

template <class C>
void round_sums(const Params& params, const Sums& sums, cudaStream_t stream) {
  const std::int64_t blocks = params.problem.B * sums.heads * ((sums.longest + kSumRows - 1) / kSumRows);
  start("attention_backward", round_sums_kernel<typename C::Element, C::kColumns>,
        {.blocks = static_cast<unsigned>(blocks), .threads = kSumThreads, .overlaps = overlaps(params)}, stream, params,
        sums);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  using C = Config<ElementOf<kType>, row.tiles, row.option>;
  return {row, kType, C::kColumns, C::kTileQ, C::kTileK, launch<C>, round_sums<C>};
}

}  // namespace heddle::cuda::sm90::attention_bwd

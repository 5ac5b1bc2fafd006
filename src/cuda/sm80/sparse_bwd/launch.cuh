// Starts one instantiation.
#pragma once

#include <algorithm>

#include "cuda/any/attention_bwd_rows/launch.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/sparse_bwd/csr.cuh"
#include "cuda/sm80/sparse_bwd/finish.cuh"
#include "cuda/sm80/sparse_bwd/kernel.cuh"
#include "cuda/sm80/sparse_bwd/variants.h"

namespace heddle::cuda::sm80::sparse_bwd {

using sparse::blocks_of;
using sparse::ceil_div;

template <class T, int kHead>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  using C = Config<T, kHead>;
  if (params.slots > 0) {
    launch_index(params, kOperation, stream);
    start(kOperation, item_kernel<C>,
          {static_cast<unsigned>(plan.item_limit * plan.subs), C::kThreads, sizeof(SharedMemory<C>)}, stream, params);
    const std::int64_t floats = std::int64_t{plan.subs} * 2 * plan.tile_keys * kHead;
    if (params.dk || params.dv)
      start(kOperation, add_items_kernel, {static_cast<unsigned>(params.numbers() * kAddingBlocks), kFinishThreads},
            stream, params, floats);
  }
  if (params.dq) {
    const std::int64_t threads = params.count * params.units * params.rows * (kHead / 8);
    start(kOperation, join_dq_kernel<T, kHead>, {blocks_of(threads, kFinishThreads), kFinishThreads}, stream, params);
  }
}

// One launch, whatever the number of rounds.
template <class T, int kHead>
void launch_rounds(const Params& params, const sparse::Csr& csr, cudaStream_t stream) {
  using C = Config<T, kHead>;
  if (csr.lists == 0) return;
  launch_csr(params, csr, kOperation, stream);
  Grid grid{.blocks = 1, .threads = C::kThreads, .shared_bytes = sizeof(SharedMemory<C>), .cooperative = true};
  grid.blocks = blocks_at_once(kOperation, rounds_kernel<C>, grid);
  start(kOperation, rounds_kernel<C>, grid, stream,
        CsrParams{params, csr, any::attention_bwd_rows::round_up_to_tile(params.problem.Sq)});
}

template <class T, int kHead>
void launch(Params params, const sparse::Csr& csr, const Plan& plan, cudaStream_t stream) {
  const SparseProblem& p = params.problem;
  if (p.lists.by_offsets) {
    launch_rounds<T, kHead>(params, csr, stream);
  } else {
    for (params.first = 0; params.first < plan.lists; params.first += plan.lists_at_once) {
      params.count = std::min(plan.lists_at_once, plan.lists - params.first);
      launch_lists<T, kHead>(params, plan, stream);
    }
  }
  if (!params.dk && !params.dv) return;
  const std::int64_t blocks = ceil_div(p.Sk, p.lists.block_size);
  start(kOperation, finish_keys_kernel<T, kHead>,
        {static_cast<unsigned>(p.B * p.Hkv * blocks * plan.subs), kFinishThreads}, stream, params,
        static_cast<int>(blocks));
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<ElementOf<kType>, row.head>};
}

}  // namespace heddle::cuda::sm80::sparse_bwd

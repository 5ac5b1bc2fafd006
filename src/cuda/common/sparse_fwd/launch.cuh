// The launches. kHopper: kernels with wgmma, to be compiled for Hopper.
#pragma once

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/sparse_fwd/by_keys.cuh"
#include "cuda/common/sparse_fwd/by_keys_csr.cuh"
#include "cuda/common/sparse_fwd/by_rows.cuh"
#include "cuda/common/sparse_fwd/combine.cuh"
#include "cuda/common/sparse_fwd/plan.h"

namespace heddle::cuda::sparse_fwd {

constexpr const char* kOperation = "sparse_attention_forward";

template <class C>
void launch_rows(const Params& params, cudaStream_t stream) {
  const std::int64_t ctas = params.count * params.units * params.row_tiles * params.parts;
  start(kOperation, by_rows::rows_kernel<C>,
        {static_cast<unsigned>(ctas), by_rows::kThreads, sizeof(by_rows::SharedMemory<C>)}, stream, params);
}

// One launch, whatever the number of rounds.
template <class T, int kHead, bool kHopper>
void launch_rounds(const Params& params, const sparse::Csr& csr, cudaStream_t stream) {
  using C = by_keys::Config<T, kHead, kHopper>;
  sparse::launch_csr(params, csr, kOperation, stream);
  Grid grid{.blocks = 1, .threads = C::kThreads, .shared_bytes = sizeof(by_keys::SharedMemory<C>), .cooperative = true};
  grid.blocks = blocks_at_once(kOperation, by_keys::rounds_kernel<C>, grid);
  start(kOperation, by_keys::rounds_kernel<C>, grid, stream, by_keys::CsrParams{params, csr});
}

template <class T, int kHead, bool kHopper, bool kCsr>
void launch_rows(const Params& params, const Plan& plan, cudaStream_t stream) {
  plan.share == 1 ? launch_rows<by_rows::Config<T, kHead, 1, kHopper, kCsr>>(params, stream)
                  : launch_rows<by_rows::Config<T, kHead, kSharingWarps, kHopper, kCsr>>(params, stream);
}

template <class T, int kHead, bool kHopper>
void launch_lists(const Params& params, const Plan& plan, cudaStream_t stream) {
  if (plan.way == Way::by_rows) {
    params.problem.lists.by_offsets ? launch_rows<T, kHead, kHopper, true>(params, plan, stream)
                                    : launch_rows<T, kHead, kHopper, false>(params, plan, stream);
    if (plan.parts == 1) return;
  } else if (params.slots > 0) {
    launch_index(params, kOperation, stream);
    using C = by_keys::Config<T, kHead, kHopper>;
    start(kOperation, by_keys::partial_kernel<C>,
          {static_cast<unsigned>(plan.item_limit * plan.subs), C::kThreads, sizeof(by_keys::SharedMemory<C>)}, stream,
          params);
  }
  const std::int64_t threads = params.count * params.units * params.rows * (kHead / 8);
  start(kOperation, combine_kernel<T, kHead>, {sparse::blocks_of(threads, kCombineThreads), kCombineThreads}, stream,
        params);
}

template <class T, int kHead, bool kHopper>
void launch(const SparseProblem& p, const Plan& plan, void* memory, cudaStream_t stream) {
  sparse::Arrays arrays(memory);
  Params params = params_of(p, plan, arrays);
  if (plan.in_rounds) return launch_rounds<T, kHead, kHopper>(params, sparse::csr_of(plan, params, arrays), stream);
  for (params.first = 0; params.first < plan.lists; params.first += plan.lists_at_once) {
    params.count = std::min(plan.lists_at_once, plan.lists - params.first);
    launch_lists<T, kHead, kHopper>(params, plan, stream);
  }
}

}  // namespace heddle::cuda::sparse_fwd

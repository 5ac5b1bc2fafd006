// Starts one instantiation.
#pragma once

#include "cuda/common/sparse_fwd/launch.cuh"
#include "cuda/sm90/sparse_fwd/together.cuh"
#include "cuda/sm90/sparse_fwd/variants.h"

namespace heddle::cuda::sm90::sparse_fwd {

template <class C>
void launch_together(const together::Params& params, cudaStream_t stream) {
  start(cuda::sparse_fwd::kOperation, together::together_kernel<C>,
        {static_cast<unsigned>(params.tiles * params.units), together::kThreads, sizeof(together::SharedMemory<C>)},
        stream, params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  using T = ElementOf<kType>;
  constexpr Row row = kVariants[kRow];
  return {row, kType, cuda::sparse_fwd::launch<T, row.head, true>, launch_together<together::Config<T, row.head>>};
}

}  // namespace heddle::cuda::sm90::sparse_fwd

// Starts one instantiation.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm80/select_blocks/kernel.cuh"
#include "cuda/sm80/select_blocks/variants.h"

namespace heddle::cuda::sm80::select_blocks {

template <class T, int kHead>
auto kernel_of(const Params& p) {
  if constexpr (kHead <= kMostHeadOfCopies) {
    if (p.copies > 1) return select_kernel<T, kHead, 1, kWarps>;
  }
  return p.problem.slots <= kWarp ? select_kernel<T, kHead, 1, 1> : select_kernel<T, kHead, kMostSlots / kWarp, 1>;
}

template <class T, int kHead>
void launch(const Params& params, unsigned blocks, std::size_t shared_bytes, cudaStream_t stream) {
  start("select_blocks", kernel_of<T, kHead>(params), {blocks, kThreads, shared_bytes}, stream, params);
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<ElementOf<kType>, row.head>};
}

}  // namespace heddle::cuda::sm80::select_blocks

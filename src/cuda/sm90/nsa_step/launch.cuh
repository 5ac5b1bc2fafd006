// Starts one instantiation.
#pragma once

#include "cuda/common/clusters.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/nsa_step/kernel.cuh"
#include "cuda/sm90/nsa_step/variants.h"

namespace heddle::cuda::sm90::nsa_step {

constexpr const char* kOperation = "nsa_step";

template <class T, int kHead, bool kPaged>
void launch(const Params& params, unsigned blocks, cudaStream_t stream) {
  start(kOperation, step_kernel<T, kHead, kPaged>,
        {.blocks = blocks,
         .threads = kThreads,
         .shared_bytes = sizeof(SharedMemory<kHead>),
         .cluster = static_cast<unsigned>(params.cluster),
         .overlaps = true},
        stream, params);
}

template <class T, int kHead, bool kPaged>
int clusters_at_once(int size) {
  static ClustersAtOnce known;
  return known.of(size, kOperation, step_kernel<T, kHead, kPaged>,
                  {.threads = kThreads, .shared_bytes = sizeof(SharedMemory<kHead>)});
}

template <DType kType, int kRow>
Variant Instance<kType, kRow>::variant() {
  using T = ElementOf<kType>;
  constexpr Row row = kVariants[kRow];
  return {row, kType, launch<T, row.head, row.paged>, clusters_at_once<T, row.head, row.paged>};
}

}  // namespace heddle::cuda::sm90::nsa_step

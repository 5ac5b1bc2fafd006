// Checks of index data on the GPU: one CTA, because it runs in validate mode only, and because what comes first in the
// order of the checks is then simply found.
#pragma once

#include <cuda_runtime.h>

#include "cuda/validate.h"
#include "problem/call_indices.h"
#include "problem/index_record.h"

namespace heddle::cuda::any::validate {

constexpr int kThreads = 512, kLanes = 32;

// The first of all threads' findings, for all of them to read. A finding is rare, so it may be slow.
class FirstOfAll {
 public:
  // `memory`: shared.
  __device__ explicit FirstOfAll(void* memory) : first_(static_cast<FirstBadIndex*>(memory)) {
    if (threadIdx.x == 0) *first_ = FirstBadIndex{};
    __syncthreads();
  }
  __device__ void add(const FirstBadIndex& found) {
    if (__syncthreads_or(found ? 1 : 0) == 0) return;
#pragma unroll 1
    for (unsigned thread = 0; thread < kThreads; ++thread) {
      if (threadIdx.x == thread) first_->note(found.place, found.bad);
      __syncthreads();
    }
  }
  __device__ const FirstBadIndex& first() const { return *first_; }

 private:
  FirstBadIndex* first_;
};

// Findings written to each record. Of the module: memory that nobody has to allocate, on each GPU.
static __device__ unsigned claims[kMostStreams];

// Writes to the record unless something lies there. Replays of graphs on two streams may come here together, and one of
// them claims it.
__device__ inline void hand_over(IndexRecord* record, int number, const char* operation, const BadIndex& bad) {
  const unsigned taken = *static_cast<volatile std::uint32_t*>(&record->taken);
  if (atomicCAS(&claims[number], taken, taken + 1) != taken) return;
  record->operation = operation;
  record->bad = bad;
  __threadfence_system();
  *static_cast<volatile std::uint32_t*>(&record->written) = taken + 1;
}

template <class Indices>
__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ Indices indices, IndexRecord* record, int number, const char* operation) {
  alignas(FirstBadIndex) __shared__ unsigned char memory[sizeof(FirstBadIndex)];
  FirstOfAll all(memory);
  all.add(check_share(indices, threadIdx.x, kThreads / kLanes, kLanes));
  if (indices.pieces() > 0 && pieces_come_first(all.first())) all.add(check_pieces(indices, threadIdx.x, kThreads));
  if (threadIdx.x == 0 && all.first()) hand_over(record, number, operation, all.first().bad);
}

}  // namespace heddle::cuda::any::validate

// The launch of the checks of index data.
#include "cuda/any/validate/kernel.cuh"
#include "cuda/any/validate/records.h"
#include "cuda/common/launch.cuh"
#include "cuda/validate.h"

namespace heddle::cuda {
template <class Indices>
void check_indices(const char* operation, const Indices& indices, void* stream) {
  using namespace any::validate;
  const StreamRecord at = record_of(operation, stream);
  start(operation, check_kernel<Indices>, {1, kThreads}, static_cast<cudaStream_t>(stream), indices, at.record,
        at.number, operation);
}

template void check_indices(const char*, const AttentionIndices&, void*);
template void check_indices(const char*, const CachedIndices&, void*);
template void check_indices(const char*, const AppendIndices&, void*);
template void check_indices(const char*, const Int4AppendIndices&, void*);
template void check_indices(const char*, const RotaryIndices&, void*);
template void check_indices(const char*, const OffsetIndices&, void*);
template void check_indices(const char*, const PoolIndices&, void*);

}  // namespace heddle::cuda

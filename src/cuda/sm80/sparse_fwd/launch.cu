#include "cuda/common/sparse_fwd/launch.cuh"
#include "cuda/sm80/sparse_fwd/host.h"

namespace heddle::cuda::sm80::sparse_fwd {

void launch(const SparseProblem& problem, void* memory, void* stream) {
  cuda::sparse_fwd::launch<false>(problem, cuda::sparse_fwd::plan_of(problem, false), memory,
                                  static_cast<cudaStream_t>(stream));
}

}  // namespace heddle::cuda::sm80::sparse_fwd

// The launch, and its memory.
#pragma once

#include <cstddef>

#include "cuda/common/sparse/host.h"

namespace heddle::cuda::sm80::sparse_bwd {

struct Plan : sparse::Cut {
  std::size_t bytes;
};

SparseProblem forward_of(const SparseBackwardProblem& problem);
Plan plan_of(const SparseBackwardProblem& problem);
void launch(const SparseBackwardProblem& problem, void* memory, void* stream);

}  // namespace heddle::cuda::sm80::sparse_bwd

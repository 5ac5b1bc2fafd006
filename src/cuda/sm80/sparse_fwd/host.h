// The launch, whose memory is the plan's.
#pragma once

#include "problem/sparse.h"

namespace heddle::cuda::sm80::sparse_fwd {

void launch(const SparseProblem& problem, void* memory, void* stream);

}  // namespace heddle::cuda::sm80::sparse_fwd

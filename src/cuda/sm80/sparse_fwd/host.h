// The launch, and its memory.
#pragma once

#include <cstddef>

#include "cuda/sm80/sparse/host.h"

namespace heddle::cuda::sm80::sparse_fwd {

struct Plan : sparse::Cut {
  bool by_rows;                 // as in Params
  int parts, row_tiles, share;  // share: warps that have the same rows
  std::size_t bytes;
};

Plan plan_of(const SparseProblem& problem);
void launch(const SparseProblem& problem, void* memory, void* stream);

}  // namespace heddle::cuda::sm80::sparse_fwd

// How the choice of blocks is cut, and the launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/select_blocks.h"

namespace heddle::cuda::sm80::select_blocks {

// Positions of a CTA, warps that share one's pooled keys, and bytes of shared memory.
struct Cut {
  std::int64_t positions, warps;
  std::size_t bytes;
};
Cut cut_of(const SelectProblem& problem);
void launch(const SelectProblem& problem, void* stream);

}  // namespace heddle::cuda::sm80::select_blocks

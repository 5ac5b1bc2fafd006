// Whether shared memory holds what the choice of blocks keeps there, and the launch.
#pragma once

#include <cstddef>

#include "problem/select_blocks.h"

namespace heddle::cuda::sm80::select_blocks {

std::size_t shared_bytes(const SelectProblem& problem);
std::int64_t positions_of_cta(const SelectProblem& problem);
void launch(const SelectProblem& problem, void* stream);

}  // namespace heddle::cuda::sm80::select_blocks

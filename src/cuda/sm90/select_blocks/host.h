// How the choice of blocks is cut on Hopper, and the launch.
#pragma once

#include "cuda/sm90/select_blocks/params.h"

namespace heddle::cuda::sm90::select_blocks {

Cut cut_of(const SelectProblem& problem);
// Of positions, of all key/value heads.
std::int64_t items_of(const SelectProblem& problem);
void launch(const SelectProblem& problem, void* stream);

}  // namespace heddle::cuda::sm90::select_blocks

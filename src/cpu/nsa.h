// The CPU's candidates for pooling keys, its gradient, and the choice of blocks.
#pragma once

#include "problem/pool.h"
#include "problem/select_blocks.h"

namespace heddle::cpu {

extern const PoolKernel kPoolKeys;
extern const PoolBackwardKernel kPoolKeysBackward;
extern const SelectKernel kSelectBlocks;

}  // namespace heddle::cpu

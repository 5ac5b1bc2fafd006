// The CPU's candidates for attention over lists of key blocks.
#pragma once

#include "problem/sparse.h"

namespace heddle::cpu {

extern const SparseForwardKernel kSparseAttentionForward;  // "cpu": rows gathered by the blocks that they list
extern const SparseBackwardKernel kSparseAttentionBackward;

}  // namespace heddle::cpu

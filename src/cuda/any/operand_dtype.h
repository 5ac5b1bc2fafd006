// What the plain kernels of attention multiply in.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any {

// That of the operands that are not f8e4m3: o's, but for an o in f32 beside 16 or 8 bits.
inline DType operand_dtype(const AttentionProblem& p) { return p.dtype == DType::f8e4m3 ? DType::bf16 : p.dtype; }

}  // namespace heddle::cuda::any

// What the plain kernels of attention multiply in.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any {

// q's dtype; for f8e4m3 bf16, which holds values times any scale: float16 ends at 65504.
inline DType operand_dtype(const AttentionProblem& p) { return p.dtype == DType::f8e4m3 ? DType::bf16 : p.dtype; }

}  // namespace heddle::cuda::any

// What the plain kernels of attention multiply in.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any {

// q's dtype; beside q in f8e4m3 that of a 16-bit o, else bf16.
inline DType operand_dtype(const AttentionProblem& p) {
  if (p.dtype != DType::f8e4m3) return p.dtype;
  return p.o.dtype == DType::f16 ? DType::f16 : DType::bf16;
}

}  // namespace heddle::cuda::any

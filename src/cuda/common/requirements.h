// What kernels ask of the GPU and of operands; refusals are empty where it is there.
#pragma once

#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle::cuda {

Refusal refuse_before_ampere();
Refusal refuse_other_than_hopper();

// Whether the rows of `x` are contiguous and begin at multiples of 16 bytes, so that they can be moved in such pieces.
bool has_rows_of_16_bytes(const Operand& x);
// q, k, v and o must have such rows, and no negative strides: tensor maps take no others.
Refusal refuse_unmappable(const AttentionProblem& p);
Refusal refuse_unmappable(const char* name, const Operand& x);

}  // namespace heddle::cuda

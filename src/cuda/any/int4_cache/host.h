// Appends to the cache in 4 bits on the GPU, on `stream`. Nobody has checked index data there: a sequence that would
// grow too long is left as it is, and rows and pages out of range are dropped.
#pragma once

#include "problem/int4_append.h"

namespace heddle::cuda {

void append_int4_cache(const Int4AppendProblem& problem, void* stream);

}  // namespace heddle::cuda

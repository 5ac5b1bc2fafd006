// Appends to the cache in 4 bits on the CPU.
#pragma once

#include "heddle/runtime.h"
#include "problem/int4_append.h"

namespace heddle::cpu {

void append_int4_cache(const Int4AppendProblem& problem, Executor& executor);

}  // namespace heddle::cpu

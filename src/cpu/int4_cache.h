// Appends to the cache in 4 bits on the CPU.
#pragma once

#include "core/int4_problem.h"
#include "heddle/runtime.h"

namespace heddle::cpu {

void append_int4_cache(const Int4AppendProblem& problem, Executor& executor);

}  // namespace heddle::cpu

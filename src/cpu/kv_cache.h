// Rotary embedding and cache appends on the CPU.
#pragma once

#include "problem/kv_cache.h"

namespace heddle::cpu {

void apply_rotary(const RotaryProblem& problem, Executor& executor);
void append_kv_cache(const AppendProblem& problem, Executor& executor);

}  // namespace heddle::cpu

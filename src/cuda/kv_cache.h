// Rotary embedding and cache appends on the GPU, on `stream`. Nobody has checked index data there: positions in the
// rotary tables are clamped, and rows whose position or page lies outside the cache are dropped.
#pragma once

#include "core/int4_problem.h"
#include "core/kv_cache_problem.h"

namespace heddle::cuda {

void apply_rotary(const RotaryProblem& problem, void* stream);
void append_kv_cache(const AppendProblem& problem, void* stream);
void append_int4_cache(const Int4AppendProblem& problem, void* stream);

}  // namespace heddle::cuda

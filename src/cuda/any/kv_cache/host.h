// Rotary embedding and cache appends on the GPU, on `stream`. Nobody has checked index data there: positions in the
// rotary tables are clamped, and rows whose position or page lies outside the cache are dropped.
#pragma once

#include "problem/kv_cache.h"

namespace heddle::cuda {

void apply_rotary(const RotaryProblem& problem, void* stream);
void append_kv_cache(const AppendProblem& problem, void* stream);

}  // namespace heddle::cuda

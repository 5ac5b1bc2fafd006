// Checked rotary and append problems, run where their data is.
#pragma once

#include "heddle/runtime.h"
#include "problem/kv_cache.h"

namespace heddle {

void run(const RotaryProblem& problem, Device device, const Runtime& runtime);
void run(const AppendProblem& problem, Device device, const Runtime& runtime);

}  // namespace heddle

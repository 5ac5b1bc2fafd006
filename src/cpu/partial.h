// Partial results joined on the CPU.
#pragma once

#include "problem/partial.h"

namespace heddle::cpu {

void merge_attention(const MergeProblem& problem, Executor& executor);
void merge_attention_backward(const MergeBackwardProblem& problem, Executor& executor);

}  // namespace heddle::cpu

// Means of blocks of keys and their gradients on the GPU, on `stream`.
#pragma once

#include <string>

#include "problem/pool.h"

namespace heddle::cuda {

void pool(const PoolProblem& problem, void* stream);
void pool_backward(const PoolBackwardProblem& problem, void* stream);
std::string describe_pool(const PoolProblem& problem);

}  // namespace heddle::cuda

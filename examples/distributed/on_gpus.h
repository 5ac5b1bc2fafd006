// What a process does for its GPU, however it came by its communicator.
#pragma once

#include <heddle/distributed.h>

#include <cstdint>

// Makes the GPU current that a process has which is the n-th of its machine.
void use_gpu(int n);

// Causal attention in bfloat16, forward and backward, over all ranks: timed, held against one GPU, and printed. Throws
// where it is too far from that.
void attend_on_gpus(heddle::distributed::Communicator& communicator, std::int64_t rows,
                    heddle::distributed::Scheme scheme);

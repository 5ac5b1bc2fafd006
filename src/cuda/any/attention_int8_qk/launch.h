// Quantises q and k, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/any/attention_int8_qk/layout.h"

namespace heddle::cuda::any::attention_int8_qk {

// Bytes of workspace for 16-bit q and k with head sizes up to 128.
std::size_t workspace_bytes(const AttentionProblem& p);

// Where all lies in it.
Codes codes_in(const AttentionProblem& p, void* workspace);

// CTAs of the largest launch.
std::int64_t blocks_to_launch(const AttentionProblem& p);

// Writes all of `codes`; the same bits every time. Rows of q and k must be in pieces of 16 bytes.
void launch(const AttentionProblem& p, const Codes& codes, cudaStream_t stream);

}  // namespace heddle::cuda::any::attention_int8_qk

// The gradient of a bias by itself, which sm80's kernel computes for every candidate: it computes P and dS once more.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/any/attention_bwd_rows/params.h"
#include "problem/attention.h"

namespace heddle::cuda {

// Empty if p.dbias is absent.
Refusal refuse_bias_gradient(const AttentionBackwardProblem& p);

// Writes p.dbias, the same bits every time, from what attention_bwd_rows has written to `rows`.
void launch_bias_gradient(const AttentionBackwardProblem& p, const any::attention_bwd_rows::Rows& rows,
                          cudaStream_t stream);

}  // namespace heddle::cuda

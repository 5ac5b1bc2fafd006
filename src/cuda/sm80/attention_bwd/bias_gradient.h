// The gradient of a bias by itself, for other candidates too: its kernel computes P and dS once more.
#pragma once

#include <cuda_runtime_api.h>

#include "core/candidate.h"
#include "cuda/any/attention_bwd_rows/params.h"

namespace heddle::cuda::sm80::attention_bwd {

// Empty if p.dbias is absent.
Refusal refuse_bias_gradient(const AttentionBackwardProblem& p);

// Writes p.dbias, the same bits every time, from what attention_bwd_rows has written to `rows`.
void launch_bias_gradient(const AttentionBackwardProblem& p, const any::attention_bwd_rows::Rows& rows,
                          cudaStream_t stream);

}  // namespace heddle::cuda::sm80::attention_bwd

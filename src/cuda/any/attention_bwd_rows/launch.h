// What every backward kernel needs of each query row, and the sink's gradient, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/any/attention_bwd_rows/params.h"

namespace heddle::cuda::any::attention_bwd_rows {

// Bytes of lse_log2 and of delta: rows of all heads.
constexpr std::int64_t statistics_bytes(const AttentionProblem& p) {
  return p.H * rows_per_head(p) * static_cast<std::int64_t>(sizeof(float));
}

// Writes all of `rows`, of every sequence up to the next multiple of kRowTile of the rows it stores.
void launch_rows(const AttentionBackwardProblem& p, const Rows& rows, cudaStream_t stream);

// Writes dsink from what launch_rows() wrote; the same bits every time. To be called if dsink is wanted.
void launch_sink_gradient(const AttentionBackwardProblem& p, const Rows& rows, cudaStream_t stream);

}  // namespace heddle::cuda::any::attention_bwd_rows

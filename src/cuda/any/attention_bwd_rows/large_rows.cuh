// Rows whose lse is too large to say what their scores sum to: with a bias of the lowest finite number at every key it
// is that number, whatever the keys are. Their denominators are found once more, relative to the row's largest logit.
#pragma once

#include <cuda_runtime_api.h>

namespace heddle::cuda::any::attention_bwd_rows {

// From here on lse is off by 2^-8 and more, and P by as much.
constexpr float kLargeLse = 0x1p17f;

// Such a row has this in place of lse_log2, and its largest logit in Rows::largest. log2_sum: of exp(logit - largest),
// from 0 on. No other row has as much, but those without keys, which have +inf.
constexpr float kLargeMark = 0x1p63f, kLargeUnit = 0x1p64f;
__device__ inline float mark_of_large_row(float log2_sum) { return fmaf(log2_sum, kLargeUnit, kLargeUnit); }
__device__ inline bool is_large_row(float lse_log2) { return lse_log2 >= kLargeMark && lse_log2 < INFINITY; }
__device__ inline float log2_sum_of_large_row(float mark) { return fmaf(mark, 1.0f / kLargeUnit, -1.0f); }

}  // namespace heddle::cuda::any::attention_bwd_rows

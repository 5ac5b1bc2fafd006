// The instantiations of the kernels, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/any/attention_baseline/params.h"

namespace heddle::cuda::any::attention_baseline {

// The three kernels, one after the other. Defined one file each in inst/.
void launch_f32(const Params& params, cudaStream_t stream);
void launch_f16(const Params& params, cudaStream_t stream);
void launch_bf16(const Params& params, cudaStream_t stream);

}  // namespace heddle::cuda::any::attention_baseline

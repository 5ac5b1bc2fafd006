#include "cuda/any/attention_baseline/launch.cuh"

namespace heddle::cuda::any::attention_baseline {

void launch_bf16(const Params& params, cudaStream_t stream) { launch<__nv_bfloat16>(params, stream); }

}  // namespace heddle::cuda::any::attention_baseline

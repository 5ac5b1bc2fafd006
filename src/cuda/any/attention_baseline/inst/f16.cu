#include "cuda/any/attention_baseline/launch.cuh"

namespace heddle::cuda::any::attention_baseline {

void launch_f16(const Params& params, cudaStream_t stream) { launch<__half>(params, stream); }

}  // namespace heddle::cuda::any::attention_baseline

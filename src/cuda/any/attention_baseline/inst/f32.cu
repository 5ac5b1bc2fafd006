#include "cuda/any/attention_baseline/launch.cuh"

namespace heddle::cuda::any::attention_baseline {

void launch_f32(const Params& params, cudaStream_t stream) { launch<float>(params, stream); }

}  // namespace heddle::cuda::any::attention_baseline

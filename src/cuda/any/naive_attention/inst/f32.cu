#include "cuda/any/naive_attention/launch.cuh"

namespace heddle::cuda::any::naive_attention {

void launch_f32(const Params& params, cudaStream_t stream) { launch<float>(params, stream); }

}  // namespace heddle::cuda::any::naive_attention

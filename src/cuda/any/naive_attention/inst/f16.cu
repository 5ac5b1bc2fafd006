#include "cuda/any/naive_attention/launch.cuh"

namespace heddle::cuda::any::naive_attention {

void launch_f16(const Params& params, cudaStream_t stream) { launch<__half>(params, stream); }

}  // namespace heddle::cuda::any::naive_attention

#include "cuda/any/naive_attention/launch.cuh"

namespace heddle::cuda::any::naive_attention {

void launch_bf16(const Params& params, cudaStream_t stream) { launch<__nv_bfloat16>(params, stream); }

}  // namespace heddle::cuda::any::naive_attention

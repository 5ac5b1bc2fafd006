#include <cuda_bf16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kBf16D96 = variant<Config<__nv_bfloat16, 96, 64>>();
}  // namespace heddle::cuda::sm90::attention_bwd

#include <cuda_fp16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kF16D96 = variant<Config<__half, 96, 64>>();
}  // namespace heddle::cuda::sm90::attention_bwd

#include <cuda_fp16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kF16D128Planes = variant<Config<__half, 128, 64, Option::kPlanes>>();
}  // namespace heddle::cuda::sm90::attention_bwd

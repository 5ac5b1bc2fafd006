#include <cuda_fp16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kF16D64Planes = variant<Config<__half, 64, 128, Option::kPlanes>>();
}  // namespace heddle::cuda::sm90::attention_bwd

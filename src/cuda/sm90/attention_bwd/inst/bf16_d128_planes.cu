#include <cuda_bf16.h>

#include "cuda/sm90/attention_bwd/launch.cuh"

namespace heddle::cuda::sm90::attention_bwd {
const Variant kBf16D128Planes = variant<Config<__nv_bfloat16, 128, 64, Option::kPlanes>>();
}  // namespace heddle::cuda::sm90::attention_bwd

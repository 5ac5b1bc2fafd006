#include <cuda_bf16.h>

#include "cuda/sm90/linear_w4a16/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a16 {
const Variant kBf16T64R2 = variant<Config<__nv_bfloat16, true, 64, 2, 1>>();
}  // namespace heddle::cuda::sm90::linear_w4a16

#include <cuda_bf16.h>

#include "cuda/sm90/linear_w4a8/launch.cuh"

namespace heddle::cuda::sm90::linear_w4a8 {
const Variant<ScaledBlock8> kBf16ScaledT64 = variant<Config<__nv_bfloat16, ScaledBlock8, 64, 4, 0>>();
}  // namespace heddle::cuda::sm90::linear_w4a8
